// The page's own script: unpacks the data, draws curves, lists rollouts and shows their tokens.
// Whatever a model wrote reaches the page by textContent alone; the policy in the head forbids more.
"use strict";
(async () => {
const $ = (id) => document.getElementById(id);
const LINE = 54, MARGIN = {left: 48, right: 10, top: 8, bottom: 20};
const MOST_TOKENS = 6000, MOST_IN_GROUP = 1500;
const [PROMPT, TOOL, SAMPLED, FORCED] = [1, 2, 3, 4];

// -- elements --------------------------------------------------------------------------------------

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const coloured = (node, colour) => (node.style.setProperty("--colour", colour), node);
const dot = (colour) => coloured(el("i", {class: "dot"}), colour);

// -- data ------------------------------------------------------------------------------------------

const TYPES = {"<i1": Int8Array, "<i2": Int16Array, "<u2": Uint16Array, "<i4": Int32Array, "<f4": Float32Array,
  "<f8": Float64Array};
async function unpack(text) {
  const packed = atob(text), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(plain).arrayBuffer();
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const columns = {};
  for (const [name, [type, at, size]] of Object.entries(header.columns)) {
    columns[name] = new TYPES[type](buffer, 8 + length + at, size);
  }
  return [header, columns];
}

const [data, columns] = await unpack($("data").textContent);
$("data").remove();
const withPrefix = (prefix) => Object.fromEntries(Object.entries(columns)
  .filter(([name]) => name.startsWith(prefix)).map(([name, c]) => [name.slice(prefix.length), c]));
const rows = withPrefix("row "), tokens = withPrefix("token ");
const parts = withPrefix("part "), labels = withPrefix("label ");
const starts = columns.starts, chatStarts = columns["chat starts"];
const string = (number) => number < 0 ? "" : data.strings[number];
const all = Array.from({length: data.num_rows}, (_, i) => i);
let lowered = null;

// A group is the answers to one prompt, an episode the rows of its turns; the last one tells of all.
const keyOf = (i, ids) => ids[i] < 0 ? "row " + i : [rows.step[i], ids[i], labels.agent ? labels.agent[i] : 0].join(" ");
function gather(ids) {
  const found = new Map();
  const lists = all.map((i) => found.get(keyOf(i, ids)) || found.set(keyOf(i, ids), []).get(keyOf(i, ids)));
  lists.forEach((list, i) => list.push(i));
  return lists;
}
const episodes = all.length ? gather(rows.trajectory) : [], groups = all.length ? gather(rows.group) : [];
const isLast = (i) => episodes[i][episodes[i].length - 1] === i;
const last = all.filter(isLast);
const membersOf = (i) => groups[i].filter(isLast);
const reward = all.map((i) => isLast(i) ? episodes[i].reduce((sum, j) => sum + rows.reward[j], 0) : rows.reward[i]);

const finite = (values) => values.filter(Number.isFinite);
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const mean = (values) => values.length ? values.reduce((a, b) => a + b) / values.length : NaN;
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const lowest = least(finite(reward)), highest = most(finite(reward));

function show(value, digits = 3) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "\u2013" : value > 0 ? "\u221e" : "-\u221e";
  const size = Math.abs(value);
  if (Object.is(value, -0)) return "0";
  if (size >= 1e6 || (size > 0 && size < 10 ** -digits)) return value.toExponential(1);
  if (size >= 1e4) return (value / 1000).toFixed(size >= 1e5 ? 0 : 1) + "k";
  return Number.isInteger(value) ? String(value) : value.toFixed(size >= 100 ? 1 : digits);
}
const signed = (value) => (value > 0 ? "+" : "") + show(value);
const counted = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

// -- tooltip ---------------------------------------------------------------------------------------

function tip(lines, x, y) {
  const node = $("tip");
  node.hidden = !lines;
  if (!lines) return;
  node.replaceChildren(...lines.map(([name, value, colour]) => el("div", {class: "pair-line"},
    el("span", {class: "name"}, colour ? dot(colour) : null, name), el("span", {class: "value"}, value))));
  const {width, height} = node.getBoundingClientRect();
  node.style.left = Math.max(8, Math.min(x + 14, innerWidth - width - 8)) + "px";
  node.style.top = (y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18) + "px";
}

{{curves}}
// -- filters and list ------------------------------------------------------------------------------

let chosen = last, current = -1, mode = data.by_prompt ? "group" : "rollout";

const choices = (node, names) => node.replaceChildren(el("option", {value: ""}, "any"),
  ...names.map(([value, name]) => el("option", {value}, name)));

function prepareFilters() {
  const named = new Set([...rows.finish, ...rows.truncation].map(string));
  choices($("finish"), [...named].filter(Boolean).sort().map((name) => [name, name.replace(/_/g, " ")]));
  $("finish").parentNode.hidden = ![...named].some(Boolean);
  $("error").parentNode.hidden = !last.some((i) => string(rows.error[i]));
  const seen = rows.masked.reduce((a, b) => a | b, 0);
  choices($("mask"), [["none", "nothing"], ...data.masks.map((name, code) => [String(code), name])
    .filter(([code]) => seen >> code & 1)]);
  for (const name of data.labels) {
    const values = [...new Set(labels[name])].map(string).filter(Boolean).sort();
    const select = el("select", {"data-label": name});
    choices(select, values.map((value) => [value, value]));
    $("labels").append(el("label", {}, name + " ", select));
  }
  [$("step-low").placeholder, $("step-high").placeholder] = [least(rows.step), most(rows.step)];
  $("by-step").hidden = most(rows.step) < 0;
  $("each-turn").hidden = last.length === all.length;
  $("mask").parentNode.hidden = !seen;
  $("each-prompt").hidden = !last.some((i) => membersOf(i).length > 1);
  $("prompts").checked = $("prompts").defaultChecked = data.by_prompt;
  if (lowest <= highest) [$("reward-low").placeholder, $("reward-high").placeholder] = [show(lowest), show(highest)];
  for (const field of $("filters").elements) field.addEventListener("input", filter);
  $("filters").onsubmit = (event) => event.preventDefault();
  $("filters").onreset = () => { setTimeout(() => filter()); };
}

const orElse = (value, other) => Number.isNaN(value) ? other : value;
const rewardsOf = (i) => finite(membersOf(i).map((j) => reward[j]));
const ORDERS = {
  high: (i) => -orElse(reward[i], -Infinity),
  low: (i) => orElse(reward[i], Infinity),
  long: (i) => starts[i] - starts[i + 1],
  spread: (i) => least(rewardsOf(i)) - most(rewardsOf(i)),
};

function filter(event) {
  if (event && event.target.id === "order") current = -1;
  const value = (id) => $(id).value;
  const bound = (id, missing) => value(id) === "" ? missing : Number(value(id));
  const words = value("text").toLowerCase();
  if (words && !lowered) lowered = data.strings.map((text) => text.toLowerCase());
  const has = words && lowered.map((text) => text.includes(words));
  const says = (i) => !words || ["prompt", "response", "expected", "error"].some((n) => has[rows[n][i]]) ||
    columns["chat texts"].subarray(chatStarts[i], chatStarts[i + 1]).some((n) => has[n]);
  const between = (x, low, high) =>  // 0.9 of a reward is not quite 0.9
    (low === -Infinity && high === Infinity) || (x >= low - 1e-6 && x <= high + 1e-6);
  const steps = [bound("step-low", -Infinity), bound("step-high", Infinity)];
  const rewards = [bound("reward-low", -Infinity), bound("reward-high", Infinity)];
  const finish = value("finish"), mask = value("mask"), error = value("error");
  const named = [...$("labels").querySelectorAll("select")].filter((s) => s.value);
  const listed = $("turns").checked ? all : last;
  chosen = listed.filter((i) => between(rows.step[i], ...steps) && between(reward[i], ...rewards) &&
    (!finish || string(rows.finish[i]) === finish || string(rows.truncation[i]) === finish) &&
    (!mask || (mask === "none" ? !rows.masked[i] : rows.masked[i] >> Number(mask) & 1)) &&
    (!error || (error === "yes") === Boolean(string(rows.error[i]))) &&
    named.every((s) => string(labels[s.dataset.label][i]) === s.value) && says(i));
  const order = ORDERS[value("order")];
  if (order) {
    const keys = new Map(chosen.map((i) => [i, order(i)]));
    chosen.sort((a, b) => keys.get(a) - keys.get(b) || a - b);
  }
  const first = (list) => $("prompts").checked ? [...new Map(list.map((i) => [groups[i], i]).reverse()).values()].reverse() : list;
  chosen = first(chosen);
  const number = first(listed).length, unit = $("prompts").checked ? "prompt" : $("turns").checked ? "turn"
    : tokens.text.length ? "rollout" : "answer";
  $("count").textContent = (chosen.length === number ? "" : `${chosen.length.toLocaleString("en")} of `) +
    counted(number, unit);
  $("list").scrollTop = 0;
  drawList();
  select(chosen.includes(current) ? current : chosen.length ? chosen[0] : -1);
}

function flags(i) {
  const flag = (text, kind) => el("span", {class: "flag " + kind}, text);
  const cut = string(rows.finish[i]) === "length" || string(rows.truncation[i]);
  return [cut ? flag("cut", "warn") : null, string(rows.error[i]) ? flag("error", "bad") : null,
    rows.num_masked[i] ? flag(rows.num_masked[i] + " masked", "warn") : null];
}

function bar(value) {
  const part = (value - lowest) / (highest - lowest || 1), node = el("span", {class: "bar"}, el("i", {}));
  node.firstChild.style.width = Number.isNaN(value) ? "0" : Math.max(4, 100 * part) + "%";
  return node;
}

const meanReward = (list) => mean(finite(list.map((j) => reward[j])));
const ofRun = (list, run) => list.filter((j) => string(labels.run[j]) === run);
const answerOf = (j) => string(rows.response[j]).slice(0, 200) || "(empty)";

function summary(i) {  // mean reward and answers of a line; of two runs the difference, and an answer of each
  const shown = $("prompts").checked ? membersOf(i) : [i], sides = data.runs.map((run) => ofRun(shown, run));
  if (shown.length < 2 || !sides.length) return [show(meanReward(shown)), [meanReward(shown)], shown.map(answerOf).join(" | ")];
  const [a, b] = sides.map(meanReward);
  return [signed(b - a), [a, b], sides.map((side) => answerOf(side[0])).join(" \u2192 ")];
}

function placeOf(i, count) {
  const told = labels.change ? string(labels.change[i]) : labels["answer is"] && string(labels["answer is"][i]);
  if (count > 1 && !labels.change) return counted(count, "answer");
  return rows.step[i] >= 0 ? "step " + rows.step[i] : told || "#" + i;
}

function listLine(at) {
  const i = chosen[at], [told, values, said] = summary(i), count = $("prompts").checked ? membersOf(i).length : 1;
  const node = el("div", {class: "item", role: "option", id: "row-" + i, "aria-selected": String(i === current),
    "aria-setsize": chosen.length, "aria-posinset": at + 1, onclick: () => select(i)}, el("span", {class: "reward"},
      el("b", {}, told), ...values.map(bar)),
    el("span", {class: "two"}, el("span", {class: "asked", dir: "auto"}, string(rows.prompt[i]).slice(0, 200) || "\u2013"),
      el("span", {class: "said", dir: "auto"}, said.slice(0, 200))),
    el("span", {class: "where"}, placeOf(i, count), ...flags(i)));
  node.style.top = at * LINE + "px";
  return node;
}

function drawList() {
  const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / LINE) - 6);
  const last = Math.min(chosen.length, Math.ceil((list.scrollTop + list.clientHeight) / LINE) + 6);
  $("lines").style.height = Math.max(chosen.length, 1) * LINE + "px";
  $("lines").replaceChildren(...chosen.slice(first, last).map((_, k) => listLine(first + k)),
    ...(chosen.length ? [] : [el("p", {class: "empty"}, "No rollout is like that.")]));
}

function select(i) {
  current = i;
  const at = chosen.indexOf(i), list = $("list");
  if (at >= 0) {
    if (at * LINE < list.scrollTop) list.scrollTop = at * LINE;
    if ((at + 1) * LINE > list.scrollTop + list.clientHeight) list.scrollTop = (at + 1) * LINE - list.clientHeight;
  }
  drawList();
  list.setAttribute("aria-activedescendant", "row-" + i);
  if (i >= 0) history.replaceState(null, "", "#" + i);
  drawDetail();
}

function move(by) {
  const at = chosen.indexOf(current) + by;
  if (chosen.length) select(chosen[Math.max(0, Math.min(chosen.length - 1, at))]);
}

// -- colours ---------------------------------------------------------------------------------------

const tint = (name, strength) => `rgb(var(--${name}) / ${Math.min(1, strength).toFixed(3)})`;
const diverging = (value) => value === 0 ? "" : tint(value > 0 ? "up" : "down", 0.1 + 0.65 * Math.min(1, Math.abs(value)));
const largestAdvantage = (tokens.advantage || []).reduce((a, b) => Math.abs(b) > a ? Math.abs(b) : a, 1e-6);
const lacks = (name, why) => (tokens[name] || []).some(Number.isFinite) ? "" : why;
const COLOURS = [
  {name: "none"},
  {name: "log-prob", column: "log_probs", missing: lacks("log_probs", "no row has log-probs"),
    ends: [0, -6], words: ["0 (certain)", "-6 nats or less"],
    scale: (v) => v < 0 ? tint("warm", 0.85 * Math.min(1, (-v / 6) ** 0.6)) : ""},
  {name: "advantage", column: "advantage", missing: lacks("advantage", "no row has an advantage: none was trained"),
    ends: [-largestAdvantage, largestAdvantage],
    words: [show(-largestAdvantage, 2) + " (less likely)", show(largestAdvantage, 2) + " (more likely)"],
    scale: (v) => Number.isNaN(v) ? "" : diverging(v / largestAdvantage)},
  {name: "ratio", column: "ratio", missing: lacks("ratio", "no row has the trainer's log-probs next to the sampler's"),
    ends: [0.5, 1.5], words: ["0.5 (less likely to the trainer)", "1.5 (more likely)"],
    scale: (v) => Number.isNaN(v) ? "" : diverging(2 * (v - 1))},
  {name: "source", column: "source", names: data.sources, scale: (code) => tint("s" + code, 0.35)},
  {name: "mask", column: "mask_reason", names: data.masks, scale: (code) => code === 1 ? "" : tint("m" + code, 0.4)},
];
const shadeOf = (k) => colour.column ? colour.scale(tokens[colour.column][k]) : "";
let colour = COLOURS.find((one, n) => n && !one.missing);

function legendOf(one) {
  if (one.names) return one.names.map((name, code) => [name, one.scale(code), code])
    .filter(([, shade, code]) => shade && tokens[one.column].includes(code))
    .map(([name, shade]) => el("span", {class: "series"}, dot(shade), name));
  if (!one.scale) return [el("span", {}, "no colours; what was not sampled is grey")];
  const steps = Array.from({length: 21}, (_, n) => one.ends[0] + (one.ends[1] - one.ends[0]) * n / 20);
  return [el("span", {}, one.words[0]),
    el("span", {class: "ramp"}, ...steps.map((v) => coloured(el("i", {}), one.scale(v)))), el("span", {}, one.words[1])];
}

function paint(one = colour) {
  colour = one;
  for (const span of document.querySelectorAll(".t")) coloured(span, shadeOf(span.token));
  for (const button of document.querySelectorAll("[data-colour]")) {
    button.setAttribute("aria-pressed", String(button.dataset.colour === colour.name));
  }
  const legend = document.querySelector(".colours .legend");
  if (legend) legend.replaceChildren(...legendOf(colour));
}

// -- one rollout -----------------------------------------------------------------------------------

function tokenSpan(k) {
  const text = string(tokens.text[k]), masked = tokens.source[k] === SAMPLED && tokens.mask_reason[k] > 0;
  const span = el("span", {class: `t s${tokens.source[k]}` + (masked ? " masked" : "")},
    text.replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u21e5\t"));
  span.token = k;
  return coloured(span, shadeOf(k));
}

function blocks(from, to) {  // each turn of the model, and what stands between them
  const found = [];
  for (let k = from; k < to; k++) {
    const own = tokens.source[k] === SAMPLED || tokens.source[k] === FORCED;
    const last = found[found.length - 1];
    const turn = own ? tokens.turns[k] : -1;
    const other = !last || last.own !== own || (turn >= 0 && last.turn >= 0 && turn !== last.turn);
    if (other) found.push({own, turn, from: k, to: k + 1});
    else [last.to, last.turn] = [k + 1, Math.max(last.turn, turn)];
  }
  return found;
}

function blockNode(block) {
  const sources = new Set(tokens.source.subarray(block.from, block.to));
  const name = block.own ? (block.turn < 0 ? "answer" : "turn " + block.turn) : sources.has(TOOL) ? "tool result"
    : sources.has(PROMPT) ? "prompt" : "template";
  const inner = Array.from({length: block.to - block.from}, (_, n) => tokenSpan(block.from + n));
  return el("div", {class: block.own ? "block own" : "block"},
    el("div", {class: "label"}, name, el("span", {}, counted(block.to - block.from, "token"))),
    el("div", {class: "text", dir: "auto"}, ...inner));
}

function conversation(i) {
  const node = el("div", {class: "tokens", tabindex: 0, role: "group", onkeydown: (event) => walk(event, node),
    "aria-label": "Conversation, arrows go from token to token"});
  const list = blocks(starts[i], starts[i + 1]), draw = () => {
    for (let drawn = 0; list.length && drawn < MOST_TOKENS;) {
      const block = list.shift(), to = Math.min(block.to, block.from + MOST_TOKENS - drawn);
      node.append(blockNode({...block, to}));
      drawn += to - block.from;
      if (to < block.to) list.unshift({...block, from: to});
    }
    if (!list.length) return;
    const button = el("button", {type: "button", onclick: () => { button.remove(); draw(); }},
      counted(starts[i + 1] - list[0].from, "more token"));
    node.append(button);
  };
  draw();
  return node;
}

function walk(event, node) {
  const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!by) return;
  event.preventDefault();
  const spans = [...node.querySelectorAll(".t")], active = spans.findIndex((s) => s.classList.contains("active"));
  const next = spans[Math.max(0, Math.min(spans.length - 1, active + by))];
  if (active >= 0) spans[active].classList.remove("active");
  if (!next) return;
  next.classList.add("active");
  next.scrollIntoView({block: "nearest"});
  const box = next.getBoundingClientRect();
  tokenTip(next.token, box.left, box.bottom - 12);
}

function tokenTip(k, x, y) {
  const reason = tokens.mask_reason[k], value = tokens.log_probs[k];
  const text = string(tokens.text[k]).replace(/\n/g, "\\n").replace(/\t/g, "\\t");
  const lines = [["text", text === data.continued ? "rest of the character before" : text],
    ["id", String(tokens.token_ids[k])], ["source", data.sources[tokens.source[k]] || "?"]];
  if (!Number.isNaN(value)) lines.push(["log-prob", `${show(value)}  (p ${show(Math.exp(value))})`]);
  if (!Number.isNaN(tokens.advantage[k])) lines.push(["advantage", signed(tokens.advantage[k])]);
  if (!Number.isNaN(tokens.ratio[k])) lines.push(["ratio", show(tokens.ratio[k])]);
  if (tokens.turns[k] >= 0) lines.push(["turn", String(tokens.turns[k])]);
  if (tokens.policy_version[k] >= 0) lines.push(["policy version", String(tokens.policy_version[k])]);
  lines.push([reason ? "not trained" : "trained", reason ? data.reasons[reason] || "code " + reason : "yes"]);
  tip(lines, x, y);
}

const fact = (name, value, kind = "") => value === "" ? null
  : el("div", {class: "fact " + kind}, el("b", {dir: "auto"}, value), el("span", {}, name));

function factsOf(i) {
  const chips = data.parts.map((name) => [name, parts[name][i]]).filter(([, v]) => !Number.isNaN(v));
  const own = data.labels.map((name) => [name, string(labels[name][i])]).filter(([, v]) => v);
  return el("div", {class: "facts-of"}, fact("reward", show(reward[i]), "large"),
    Number.isNaN(rows.advantage[i]) ? null : fact("advantage", signed(rows.advantage[i]), "large"),
    ...chips.map(([name, v]) => fact(name, show(v))), fact("finish", string(rows.finish[i]).replace(/_/g, " ")),
    fact("episode cut", string(rows.truncation[i]).replace(/_/g, " ")),
    starts[i + 1] > starts[i] ? fact("sampled, of all tokens", `${rows.sampled[i]} / ${starts[i + 1] - starts[i]}`) : null,
    ...own.map(([name, v]) => fact(name, v)), fact("expected", string(rows.expected[i]).slice(0, 200)));
}

function callouts(i) {
  const found = string(rows.error[i]) ? [el("pre", {class: "callout bad"}, string(rows.error[i]))] : [];
  const counts = new Map();
  tokens.mask_reason.subarray(starts[i], starts[i + 1]).forEach((reason, n) => {
    if (reason && tokens.source[starts[i] + n] === SAMPLED) counts.set(reason, (counts.get(reason) || 0) + 1);
  });
  for (const [reason, n] of counts) found.push(el("p", {class: "callout warn"},
    `${counted(n, "sampled token")} not trained: ${data.reasons[reason] || "code " + reason}`));
  return found;
}

function messages(i) {  // of a run without a tokenizer, whose tokens are ids
  const [roles, texts] = ["roles", "texts"]
    .map((name) => columns["chat " + name].subarray(chatStarts[i], chatStarts[i + 1]));
  return el("div", {class: "tokens messages"}, ...Array.from(roles, (role, n) => el("div", {class: "block"},
    el("div", {class: "label"}, string(role)), el("div", {class: "text", dir: "auto"}, string(texts[n])))));
}

function member(j) {
  const first = blocks(starts[j], starts[j + 1]).find((block) => block.own);
  const from = first ? first.from : starts[j + 1], to = Math.min(starts[j + 1], from + MOST_IN_GROUP);
  const left = starts[j + 1] - to;
  return el("div", {class: "member" + (j === current ? " current" : "")},
    el("button", {type: "button", title: "Show this rollout", onclick: () => { mode = "rollout"; select(j); }},
      el("b", {}, show(reward[j])),
      Number.isNaN(rows.advantage[j]) ? null : el("span", {}, "adv. " + signed(rows.advantage[j])),
      labels["answer is"] ? el("span", {}, string(labels["answer is"][j])) : null, ...flags(j)),
    el("div", {class: "tokens"}, ...blocks(from, to).map(blockNode),
      starts[j + 1] > starts[j] ? null : el("div", {class: "text", dir: "auto"}, string(rows.response[j])),
      left ? el("p", {class: "empty"}, counted(left, "more token")) : null));
}

function groupView(i) {
  const members = [...membersOf(i)].sort((a, b) => ORDERS.high(a) - ORDERS.high(b) || a - b);
  const asked = el("p", {class: "asked-of-all", dir: "auto"}, string(rows.prompt[i]),
    string(rows.expected[i]) ? el("span", {}, "expected " + string(rows.expected[i]).slice(0, 200)) : null);
  if (!data.runs.length) return [asked, el("div", {class: "members"}, ...members.map(member))];
  return [asked, el("div", {class: "sides"}, ...data.runs.map((run) => el("div", {}, el("h3", {}, run),
    el("div", {class: "members"}, ...ofRun(members, run).map(member)))))];
}

function drawDetail() {
  const i = current, node = $("detail");
  tip(null);
  if (i < 0) return node.replaceChildren();
  const size = membersOf(i).length, grouped = mode === "group" && size > 1, at = membersOf(i).indexOf(i) + 1, asked = string(rows.prompt[i]);
  const told = [rows.step[i] < 0 ? "" : "step " + rows.step[i],
    asked && `\u201c${asked.slice(0, 60)}${asked.length > 60 ? " \u2026" : ""}\u201d`,
    size < 2 ? "" : grouped ? counted(size, "answer") : at ? `answer ${at} of ${size}` : "",
    episodes[i].length > 1 && !isLast(i) ? "turn " + rows.turn[i] : "",
    grouped && labels.change ? string(labels.change[i]) : ""].filter(Boolean);
  const tab = (name, text) => el("button", {type: "button", role: "tab", "aria-selected": String(mode === name),
    disabled: name === "group" && size < 2, onclick: () => { mode = name; drawDetail(); }}, text);
  const shades = COLOURS.map((one, n) => el("button", {type: "button", "data-colour": one.name,
    disabled: Boolean(one.missing), title: one.missing || `key ${n + 1}`, onclick: () => paint(one)}, one.name));
  node.replaceChildren(
    el("div", {class: "head"}, el("h2", {}, told.join(" \u00b7 ") || "row " + i),
      el("div", {class: "buttons"}, ...[["previous", -1, "\u2039"], ["next", 1, "\u203a"]].map(([name, by, sign]) =>
        el("button", {type: "button", onclick: () => move(by), "aria-label": name}, sign)))),
    ...(grouped ? [] : [factsOf(i), ...callouts(i)]),
    el("div", {class: "bar-line"}, el("div", {class: "segments", role: "tablist"}, tab("rollout", tokens.text.length ? "rollout" : "answer"),
      tab("group", size > 1 ? "group of " + size : "no group")), tokens.text.length ? el("div", {class: "segments",
      role: "group", "aria-label": "Colour of the tokens"}, ...shades) : null),
    el("div", {class: "colours"}, tokens.text.length ? el("div", {class: "legend"}) : null),
    ...(grouped ? groupView(i) : [...(data.tokenizer ? [] : [messages(i)]),
      ...(starts[i + 1] > starts[i] ? [conversation(i)] : [])]));
  paint();
}

// -- a language run --------------------------------------------------------------------------------

{{language}}
// -- the page --------------------------------------------------------------------------------------

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") { tip(null); document.activeElement.blur(); }
  if (event.target.closest("input, select, textarea")) return;
  const inList = event.target === $("list");
  const far = chosen.length, listKeys = {ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -far, End: far};
  const by = {j: 1, k: -1, ...(inList ? listKeys : {})}[event.key];
  const shade = COLOURS[Number(event.key) - 1];
  if (by) move(by);
  else if (event.key === "g" && current >= 0) { mode = mode === "group" ? "rollout" : "group"; drawDetail(); }
  else if (event.key === "/") $("text").focus();
  else if (shade && !shade.missing) paint(shade);
  else return;
  event.preventDefault();
}

$("title").textContent = document.title = data.title;
$("facts").append(...Object.entries(data.facts).map(([name, value]) => el("span", {}, name + " ", el("b", {}, value))));
$("notices").append(...data.notices.map((text) => el("p", {class: "notice"}, text)));
$("tables").append(...data.tables.map(({title, rows: [head, ...lines]}) => el("figure", {class: "card table"},
  el("figcaption", {}, el("span", {class: "name"}, title)), el("div", {class: "scroll"}, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((text) => el("th", {scope: "col"}, text)))),
    el("tbody", {}, ...lines.map(([name, ...cells]) => el("tr", {}, el("th", {scope: "row"}, name),
      ...cells.map((text) => el("td", {class: text.length > 40 && "long"}, text))))))))));
$("theme").addEventListener("click", () => {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light", root = document.documentElement;
  root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
});
document.addEventListener("keydown", keys);
document.addEventListener("pointerover", (event) => {
  const span = event.target.closest(".t");
  if (span) tokenTip(span.token, event.clientX, event.clientY);
  else if (!event.target.closest(".plot")) tip(null);
});
drawCurves();
if (data.language) drawLanguage(data.language);
if (all.length) {
  $("rollouts").hidden = false;
  prepareFilters();
  $("list").addEventListener("scroll", () => requestAnimationFrame(drawList));
  new ResizeObserver(drawList).observe($("list"));
  const asked = Number(location.hash.slice(1) || NaN);
  if (Number.isInteger(asked) && asked < all.length) current = asked;
  filter();
}
document.documentElement.dataset.readyMs = Math.round(performance.now());
})();
