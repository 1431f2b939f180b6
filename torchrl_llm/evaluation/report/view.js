// The page's own script: unpacks the data, draws curves, lists rollouts and shows their tokens.
// Whatever a model wrote reaches the page by textContent alone; the policy in the head forbids more.
"use strict";
(async () => {
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const LINE = 62, MARGIN = {left: 44, right: 10, top: 8, bottom: 20};
const MOST_TOKENS = 6000, MOST_IN_GROUP = 1500;
const [TEMPLATE, PROMPT, TOOL, SAMPLED, FORCED] = [0, 1, 2, 3, 4];

// -- elements ---------------------------------------------------------------------------------

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// -- data -------------------------------------------------------------------------------------

const TYPES = {"<i1": Int8Array, "<i2": Int16Array, "<u2": Uint16Array, "<i4": Int32Array,
  "<f4": Float32Array, "<f8": Float64Array};

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
const lower = {texts: null};

const finite = (values) => Array.from(values || []).filter(Number.isFinite);
const largest = (values) => finite(values).reduce((a, b) => Math.max(a, Math.abs(b)), 0);
const lowest = finite(rows.reward).reduce((a, b) => Math.min(a, b), Infinity);
const highest = finite(rows.reward).reduce((a, b) => Math.max(a, b), -Infinity);
const groups = new Map();
for (const i of all) {
  if (rows.group[i] < 0) continue;
  const key = rows.step[i] + " " + rows.group[i];
  groups.set(key, [...(groups.get(key) || []), i]);
}
const groupOf = (i) => groups.get(rows.step[i] + " " + rows.group[i]) || [i];

function lastRows(members) {  // of each episode, which may have a row for each turn
  const found = new Map();
  for (const i of members) found.set(rows.trajectory[i] < 0 ? "row " + i : rows.trajectory[i], i);
  return [...found.values()];
}

function spread(i) {
  const rewards = finite(lastRows(groupOf(i)).map((j) => rows.reward[j]));
  return rewards.length ? Math.max(...rewards) - Math.min(...rewards) : -1;
}

function show(value, digits = 3) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "\u2013" : value > 0 ? "\u221e" : "-\u221e";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 10 ** -digits)) return value.toExponential(1);
  if (size >= 1e4) return (value / 1000).toFixed(size >= 1e5 ? 0 : 1) + "k";
  return Number.isInteger(value) ? String(value) : value.toFixed(size >= 100 ? 1 : digits);
}
const signed = (value) => (value > 0 ? "+" : "") + show(value);
const counted = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

// -- tooltip ----------------------------------------------------------------------------------

function tip(lines, x, y) {
  const node = $("tip");
  node.hidden = !lines;
  if (!lines) return;
  node.replaceChildren(...lines.map(([name, value, colour]) => el("div", {class: "pair-line"},
    el("span", {class: "name"}, colour ? dot(colour) : null, name),
    el("span", {class: "value"}, value))));
  const {width, height} = node.getBoundingClientRect();
  node.style.left = Math.max(8, Math.min(x + 14, innerWidth - width - 8)) + "px";
  node.style.top = (y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18) + "px";
}

function dot(colour) {
  const node = el("i", {class: "dot"});
  node.style.backgroundColor = colour;
  return node;
}

// -- curves -----------------------------------------------------------------------------------

const cards = [];
const range = {low: Infinity, high: -Infinity};
for (const panel of data.panels) for (const name of panel.names) {
  const steps = columns[name + " steps"];
  range.low = Math.min(range.low, steps[0]);
  range.high = Math.max(range.high, steps[steps.length - 1]);
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

function seriesOf(panel, stacked) {
  const found = panel.names.map((name, i) => {
    const points = new Map(), values = columns[name + " values"];
    columns[name + " steps"].forEach((step, k) => {
      if (Number.isFinite(values[k])) points.set(step, values[k]);
    });
    return {name, points, colour: `var(--c${i % 8})`, last: values[values.length - 1]};
  });
  // Fates that no token met would only fill the legend.
  return stacked ? found.filter((one) => [...one.points.values()].some((v) => v)) : found;
}

function outline(points, width) {  // at most two points a pixel: the lowest and the highest
  if (points.length <= 3 * width) return points;
  const kept = [], size = points.length / width;
  for (let at = 0; at < width; at++) {
    const bin = points.slice(Math.floor(at * size), Math.floor((at + 1) * size));
    const low = bin.reduce((a, b) => b[1] < a[1] ? b : a), high = bin.reduce((a, b) => b[1] > a[1] ? b : a);
    kept.push(...(low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

class Card {
  constructor(panel) {
    this.stacked = panel.title === data.ledger;
    this.series = seriesOf(panel, this.stacked);
    this.plot = el("div", {class: "plot"});
    const several = this.series.length > 1;
    const legend = this.series.map((one) => el("span", {class: "series"},
      several ? dot(one.colour) : null, several ? one.name.replace(/^(train|eval)\/(tokens_)?/, "$1 ")
        .replace(this.stacked ? /^train / : /^$/, "") + " " : null, el("b", {}, show(one.last))));
    this.node = el("figure", {class: "card"},
      el("figcaption", {}, el("span", {class: "name", title: panel.names.join(", ")}, panel.title),
        el("span", {class: "legend"}, ...legend)), this.plot);
    cards.push(this);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  stack() {  // each series on top of those before it
    const below = new Map();
    return this.series.map((one) => {
      const points = [...one.points].map(([step, value]) => {
        const from = below.get(step) || 0;
        below.set(step, from + value);
        return [step, from + value, from];
      });
      return {...one, points};
    });
  }

  draw() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    if (!width || !this.series.length) return;
    const drawn = this.stacked ? this.stack() : this.series.map((one) => ({...one, points: [...one.points]}));
    const values = drawn.flatMap((one) => one.points.map((point) => point[1]));
    let low = values.reduce((a, b) => Math.min(a, b), Infinity);
    let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (this.stacked || (low >= 0 && low < high / 2)) low = Math.min(low, 0);
    if (!(high > low)) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    const inner = {width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom};
    this.x = (step) => MARGIN.left + (step - range.low) / (range.high - range.low || 1) * inner.width;
    this.step = (x) => range.low + (x - MARGIN.left) / inner.width * (range.high - range.low);
    const y = (value) => MARGIN.top + (high - value) / (high - low) * inner.height;
    const at = (points, k) => outline(points, inner.width)
      .map((p) => `${this.x(p[0]).toFixed(1)} ${y(p[k]).toFixed(1)}`);
    const lines = [];
    for (const tick of ticks(low, high, 3)) {
      lines.push(svg("line", {class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick)}),
        svg("text", {class: "tick", x: MARGIN.left - 6, y: y(tick) + 3.5, "text-anchor": "end"}, show(tick, 2)));
    }
    for (const tick of ticks(range.low, range.high || 1, Math.max(2, Math.round(inner.width / 70)))) {
      if (Number.isInteger(tick)) lines.push(svg("text",
        {class: "tick", x: this.x(tick), y: height - 4, "text-anchor": "middle"}, show(tick)));
    }
    for (const one of drawn) {
      if (!one.points.length) continue;
      const path = "M" + at(one.points, 1).join("L");
      const shape = this.stacked
        ? svg("path", {class: "area", d: path + "L" + at(one.points, 2).reverse().join("L") + "Z"})
        : svg("path", {class: "line", d: path});
      shape.style.setProperty("--colour", one.colour);
      lines.push(shape);
      for (const [step, value] of one.points.length <= 24 && !this.stacked ? one.points : []) {
        const point = svg("circle", {class: "point", cx: this.x(step), cy: y(value), r: 2});
        point.style.setProperty("--colour", one.colour);
        lines.push(point);
      }
    }
    this.cursor = svg("line", {class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden"});
    const picture = svg("svg", {width, height, role: "img", tabindex: 0,
      "aria-label": this.node.querySelector(".name").textContent}, ...lines, this.cursor);
    picture.addEventListener("pointermove", (event) => {
      const step = Math.round(this.step(event.clientX - picture.getBoundingClientRect().left));
      this.point(step, event.clientX, event.clientY);
    });
    picture.addEventListener("pointerleave", () => this.point(null));
    picture.addEventListener("blur", () => this.point(null));
    picture.addEventListener("click", () => this.at !== null && chooseStep(this.at));
    picture.addEventListener("keydown", (event) => {
      const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (event.key === "Enter" && this.at !== null) chooseStep(this.at);
      if (!move) return;
      event.preventDefault();
      const box = picture.getBoundingClientRect(), from = this.at === null ? range.high - move : this.at;
      const step = Math.max(range.low, Math.min(range.high, from + move));
      this.point(step, box.left + this.x(step), box.top + height / 2);
    });
    this.at = null;
    this.plot.replaceChildren(picture);
  }

  point(step, x, y) {
    this.at = step === null ? null : Math.max(range.low, Math.min(range.high, step));
    for (const card of cards) {
      if (!card.cursor) continue;
      card.cursor.setAttribute("visibility", this.at === null ? "hidden" : "visible");
      for (const end of ["x1", "x2"]) if (this.at !== null) card.cursor.setAttribute(end, card.x(this.at));
    }
    tip(this.at === null ? null : [["step", String(this.at)], ...this.series.map((one) =>
      [one.name, one.points.has(this.at) ? show(one.points.get(this.at)) : "\u2013", one.colour])], x, y);
  }
}

function drawCurves() {
  const shown = data.panels.filter((panel) => !panel.more), more = data.panels.filter((panel) => panel.more);
  $("curves").hidden = !data.panels.length;
  $("panels").append(...shown.map((panel) => new Card(panel).node));
  $("more").hidden = !more.length;
  $("more").querySelector("summary").textContent = counted(more.length, "more metric");
  $("more").addEventListener("toggle", () => {
    if (!$("panels-more").children.length) $("panels-more").append(...more.map((p) => new Card(p).node));
  });
}

function chooseStep(step) {
  if (!rows.step) return;
  $("step-low").value = $("step-high").value = step;
  filter();
  $("rollouts").scrollIntoView({behavior: "smooth"});
}

// -- filters and list -------------------------------------------------------------------------

let chosen = all, current = -1, mode = "rollout";

function choices(node, names) {
  node.replaceChildren(el("option", {value: ""}, "any"),
    ...names.map(([value, name]) => el("option", {value}, name)));
}

function prepareFilters() {
  const ends = new Set([...(rows.finish || []), ...(rows.truncation || [])].map(string));
  choices($("finish"), [...ends].filter(Boolean).sort().map((name) => [name, name.replace(/_/g, " ")]));
  const seen = (rows.masked || []).reduce((a, b) => a | b, 0);
  choices($("mask"), [["none", "nothing"], ...data.masks.map((name, code) => [String(code), name])
    .filter(([code]) => seen >> code & 1)]);
  for (const name of data.labels) {
    const values = [...new Set(labels[name])].map(string).filter(Boolean).sort();
    const select = el("select", {"data-label": name});
    choices(select, values.map((value) => [value, value]));
    $("labels").append(el("label", {}, name + " ", select));
  }
  $("step-low").placeholder = Math.min(...rows.step);
  $("step-high").placeholder = Math.max(...rows.step);
  if (lowest <= highest) [$("reward-low").placeholder, $("reward-high").placeholder] = [show(lowest), show(highest)];
  $("filters").addEventListener("input", filter);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").addEventListener("reset", () => setTimeout(filter));
}

const ORDERS = {
  high: (i) => Number.isNaN(rows.reward[i]) ? Infinity : -rows.reward[i],
  low: (i) => Number.isNaN(rows.reward[i]) ? Infinity : rows.reward[i],
  long: (i) => starts[i] - starts[i + 1],
  spread: (i) => -spread(i),
};

function filter() {
  const value = (id) => $(id).value;
  const bound = (id, missing) => value(id) === "" ? missing : Number(value(id));
  const words = value("text").toLowerCase();
  if (words && !lower.texts) lower.texts = data.strings.map((text) => text.toLowerCase());
  const has = words && lower.texts.map((text) => text.includes(words));
  const says = (i) => !words || ["prompt", "response", "expected", "error"].some((n) => has[rows[n][i]]) ||
    columns["chat texts"].subarray(chatStarts[i], chatStarts[i + 1]).some((n) => has[n]);
  const between = (x, low, high) => (low === -Infinity && high === Infinity) || (x >= low && x <= high);
  const steps = [bound("step-low", -Infinity), bound("step-high", Infinity)];
  const rewards = [bound("reward-low", -Infinity), bound("reward-high", Infinity)];
  const finish = value("finish"), mask = value("mask"), error = value("error");
  const named = [...$("labels").querySelectorAll("select")].filter((s) => s.value);
  chosen = all.filter((i) => between(rows.step[i], ...steps) && between(rows.reward[i], ...rewards) &&
    (!finish || string(rows.finish[i]) === finish || string(rows.truncation[i]) === finish) &&
    (!mask || (mask === "none" ? !rows.masked[i] : rows.masked[i] >> Number(mask) & 1)) &&
    (!error || (error === "yes") === Boolean(string(rows.error[i]))) &&
    named.every((s) => string(labels[s.dataset.label][i]) === s.value) && says(i));
  const order = ORDERS[value("order")];
  if (order) {
    const keys = new Map(chosen.map((i) => [i, order(i)]));
    chosen.sort((a, b) => keys.get(a) - keys.get(b) || a - b);
  }
  $("count").textContent = chosen.length === all.length ? counted(all.length, "rollout")
    : `${chosen.length.toLocaleString("en")} of ${counted(all.length, "rollout")}`;
  $("list").scrollTop = 0;
  drawList();
  select(chosen.includes(current) ? current : chosen.length ? chosen[0] : -1);
}

function flag(text, kind) {
  return el("span", {class: "flag " + kind}, text);
}

function flags(i) {
  const cut = string(rows.finish[i]) === "length" || string(rows.truncation[i]);
  return [cut ? flag("cut", "warn") : null, string(rows.error[i]) ? flag("error", "bad") : null,
    rows.num_masked[i] ? flag(rows.num_masked[i] + " masked", "warn") : null];
}

function rewardBar(i) {
  const value = rows.reward[i], part = (value - lowest) / (highest - lowest || 1);
  const bar = el("span", {class: "bar"}, el("i", {}));
  bar.firstChild.style.width = Number.isNaN(value) ? "0" : Math.max(4, 100 * part) + "%";
  return el("span", {class: "reward"}, el("b", {}, show(value)), bar);
}

function listLine(at) {
  const i = chosen[at];
  const node = el("div", {class: "item", role: "option", id: "row-" + i, "aria-selected": String(i === current),
    "aria-setsize": chosen.length, "aria-posinset": at + 1, onclick: () => select(i)}, rewardBar(i),
    el("span", {class: "two"}, el("span", {class: "asked", dir: "auto"}, string(rows.prompt[i]).slice(0, 200) || "\u2013"),
      el("span", {class: "said", dir: "auto"}, string(rows.response[i]).slice(0, 200) || "(empty)")),
    el("span", {class: "where"}, rows.step[i] < 0 ? "#" + i : "step " + rows.step[i], ...flags(i)));
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

function select(i, scroll = true) {
  current = i;
  const at = chosen.indexOf(i), list = $("list");
  if (at >= 0 && scroll) {
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

// -- colours ----------------------------------------------------------------------------------

const tint = (name, strength) => `rgb(var(--${name}) / ${Math.min(1, strength).toFixed(3)})`;
const diverging = (value) => value === 0 ? "" : tint(value > 0 ? "up" : "down", 0.1 + 0.65 * Math.min(1, Math.abs(value)));
const largestAdvantage = largest(tokens.advantage) || 1;
const COLOURS = [
  {name: "none", of: () => ""},
  {name: "log-prob", missing: largest(tokens.log_probs) || finite(tokens.log_probs).length ? "" : "no row has log-probs",
    of: (k) => COLOURS[1].scale(tokens.log_probs[k]), ends: [0, -6], words: ["0 (certain)", "-6 nats or less"],
    scale: (v) => v < 0 ? tint("warm", 0.85 * Math.min(1, (-v / 6) ** 0.6)) : ""},
  {name: "advantage", missing: finite(tokens.advantage).length ? "" : "no row has an advantage: these rows were not trained",
    of: (k) => COLOURS[2].scale(tokens.advantage[k]), ends: [-largestAdvantage, largestAdvantage],
    words: [show(-largestAdvantage, 2) + " (less likely)", show(largestAdvantage, 2) + " (more likely)"],
    scale: (v) => Number.isNaN(v) ? "" : diverging(v / largestAdvantage)},
  {name: "ratio", missing: finite(tokens.ratio).length ? "" : "no row has the trainer's log-probs next to the sampler's",
    of: (k) => COLOURS[3].scale(tokens.ratio[k]), ends: [0.5, 1.5], words: ["0.5 (trainer finds it less likely)", "1.5 or more"],
    scale: (v) => Number.isNaN(v) ? "" : diverging(2 * (v - 1))},
  {name: "source", of: (k) => tint("s" + tokens.source[k], 0.3),
    list: () => data.sources.map((name, code) => [name, tint("s" + code, 0.45)])},
  {name: "mask", of: (k) => COLOURS[5].scale(tokens.mask_reason[k]),
    scale: (code) => code === 1 ? "" : tint("m" + code, 0.35),
    list: () => data.masks.map((name, code) => [name, tint("m" + code, 0.5), code])
      .filter(([, , code]) => code !== 1 && (code === 0 || tokens.mask_reason.includes(code)))},
];
let colour = COLOURS.find((c, n) => n && !c.missing);

function legendOf(one) {
  if (one.list) return one.list().map(([name, shade]) => el("span", {class: "series"}, dot(shade), name));
  if (!one.scale) return [el("span", {}, "no colours; what was not sampled is grey")];
  const steps = Array.from({length: 21}, (_, n) => one.ends[0] + (one.ends[1] - one.ends[0]) * n / 20);
  return [el("span", {}, one.words[0]), el("span", {class: "ramp"}, ...steps.map((v) => {
    const cell = el("i", {});
    cell.style.backgroundColor = one.scale(v);
    return cell;
  })), el("span", {}, one.words[1])];
}

function paint(one = colour) {
  colour = one;
  for (const span of document.querySelectorAll(".t")) span.style.backgroundColor = colour.of(span.token);
  for (const button of document.querySelectorAll("[data-colour]")) {
    button.setAttribute("aria-pressed", String(button.dataset.colour === colour.name));
  }
  const legend = document.querySelector(".colours .legend");
  if (legend) legend.replaceChildren(...legendOf(colour));
}

// -- one rollout ------------------------------------------------------------------------------

function tokenSpan(k) {
  const text = string(tokens.text[k]), masked = tokens.source[k] === SAMPLED && tokens.mask_reason[k] > 0;
  const span = el("span", {class: `t s${tokens.source[k]}` + (masked ? " masked" : "")},
    text.replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u21e5\t"));
  span.token = k;
  span.style.backgroundColor = colour.of(k);
  return span;
}

function blocks(from, to) {  // each turn of the model, and what stands between them
  const found = [];
  for (let k = from; k < to; k++) {
    const own = tokens.source[k] === SAMPLED || tokens.source[k] === FORCED;
    const last = found[found.length - 1];
    const turn = own ? tokens.turns[k] : -1;
    if (!last || last.own !== own || (own && turn >= 0 && last.turn >= 0 && turn !== last.turn)) found.push({own, turn, from: k, to: k + 1});
    else [last.to, last.turn] = [k + 1, Math.max(last.turn, turn)];
  }
  return found;
}

function blockNode(block, to = block.to) {
  const sources = new Set(tokens.source.subarray(block.from, block.to));
  const name = block.own ? (block.turn < 0 ? "answer" : "turn " + block.turn) : sources.has(TOOL) ? "tool result"
    : sources.has(PROMPT) ? "prompt" : "template";
  const inner = [];
  for (let k = block.from; k < to; k++) inner.push(tokenSpan(k));
  return el("div", {class: block.own ? "block own" : "block"},
    el("div", {class: "label"}, name, el("span", {}, counted(block.to - block.from, "token"))),
    el("div", {class: "text", dir: "auto"}, ...inner));
}

function conversation(i) {
  const node = el("div", {class: "tokens", tabindex: 0, role: "group", "aria-label": "Conversation, arrows go from token to token"});
  const list = blocks(starts[i], starts[i + 1]);
  const draw = () => {
    for (let drawn = 0; list.length && drawn < MOST_TOKENS;) {
      const block = list.shift(), to = Math.min(block.to, block.from + MOST_TOKENS - drawn);
      node.append(blockNode({...block, to}));
      drawn += to - block.from;
      if (to < block.to) list.unshift({...block, from: to});
    }
    if (!list.length) return;
    const rest = starts[i + 1] - list[0].from;
    const button = el("button", {type: "button", onclick: () => { button.remove(); draw(); }},
      `${counted(rest, "more token")}`);
    node.append(button);
  };
  draw();
  node.addEventListener("keydown", (event) => walk(event, node));
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
  const text = string(tokens.text[k]);
  const lines = [["text", text === data.continued ? "rest of the character before" : JSON.stringify(text).slice(1, -1).replace(/\\\\/g, "\\")],
    ["id", String(tokens.token_ids[k])], ["source", data.sources[tokens.source[k]] || "?"]];
  if (!Number.isNaN(value)) lines.push(["log-prob", `${show(value)}  (p ${show(Math.exp(value))})`]);
  if (!Number.isNaN(tokens.advantage[k])) lines.push(["advantage", signed(tokens.advantage[k])]);
  if (!Number.isNaN(tokens.ratio[k])) lines.push(["ratio", show(tokens.ratio[k])]);
  if (tokens.turns[k] >= 0) lines.push(["turn", String(tokens.turns[k])]);
  if (tokens.policy_version[k] >= 0) lines.push(["policy version", String(tokens.policy_version[k])]);
  lines.push([reason ? "not trained" : "trained", reason ? data.reasons[reason] || "code " + reason : "yes"]);
  tip(lines, x, y);
}

function fact(name, value, kind = "") {
  return value === "" || value === null ? null : el("div", {class: "fact " + kind}, el("b", {dir: "auto"}, value), el("span", {}, name));
}

function factsOf(i) {
  const chips = data.parts.map((name) => [name, parts[name][i]]).filter(([, v]) => !Number.isNaN(v));
  const own = data.labels.map((name) => [name, string(labels[name][i])]).filter(([, v]) => v);
  return el("div", {class: "facts-of"}, fact("reward", show(rows.reward[i]), "large"),
    Number.isNaN(rows.advantage[i]) ? null : fact("advantage", signed(rows.advantage[i]), "large"),
    ...chips.map(([name, v]) => fact(name, show(v))), fact("finish", string(rows.finish[i]).replace(/_/g, " ")),
    fact("episode cut", string(rows.truncation[i]).replace(/_/g, " ")),
    fact("sampled tokens", String(rows.sampled[i])), fact("of", String(starts[i + 1] - starts[i])),
    ...own.map(([name, v]) => fact(name, v)), fact("expected", string(rows.expected[i]).slice(0, 200)));
}

function callouts(i) {
  const found = string(rows.error[i]) ? [el("pre", {class: "callout bad"}, string(rows.error[i]))] : [];
  const counts = new Map();
  for (let k = starts[i]; k < starts[i + 1]; k++) {
    const reason = tokens.mask_reason[k];
    if (tokens.source[k] === SAMPLED && reason) counts.set(reason, (counts.get(reason) || 0) + 1);
  }
  for (const [reason, n] of counts) found.push(el("p", {class: "callout warn"},
    `${counted(n, "sampled token")} not trained: ${data.reasons[reason] || "code " + reason}`));
  return found;
}

function messages(i) {  // of a run without a tokenizer, whose tokens are ids
  const found = [];
  for (let k = chatStarts[i]; k < chatStarts[i + 1]; k++) {
    found.push(el("div", {class: "block"}, el("div", {class: "label"}, string(columns["chat roles"][k])),
      el("div", {class: "text", dir: "auto"}, string(columns["chat texts"][k]))));
  }
  return el("div", {class: "tokens messages"}, ...found);
}

function member(j) {
  const first = blocks(starts[j], starts[j + 1]).find((block) => block.own);
  const from = first ? first.from : starts[j + 1], to = Math.min(starts[j + 1], from + MOST_IN_GROUP);
  const left = starts[j + 1] - to;
  return el("div", {class: "member" + (j === current ? " current" : "")},
    el("button", {type: "button", title: "Show this rollout", onclick: () => { mode = "rollout"; select(j); }},
      el("b", {}, show(rows.reward[j])), Number.isNaN(rows.advantage[j]) ? null : el("span", {}, "adv. " + signed(rows.advantage[j])),
      ...flags(j)),
    el("div", {class: "tokens"}, ...blocks(from, to).map((block) => blockNode(block)),
      left ? el("p", {class: "empty"}, counted(left, "more token")) : null));
}

function groupView(i) {
  const members = lastRows(groupOf(i)).sort((a, b) =>
    (Number.isNaN(rows.reward[b]) ? -Infinity : rows.reward[b]) - (Number.isNaN(rows.reward[a]) ? -Infinity : rows.reward[a]) || a - b);
  return [el("p", {class: "asked-of-all", dir: "auto"}, string(rows.prompt[i]),
    string(rows.expected[i]) ? el("span", {}, "expected " + string(rows.expected[i]).slice(0, 200)) : null),
    el("div", {class: "members"}, ...members.map(member))];
}

function drawDetail() {
  const i = current, node = $("detail");
  tip(null);
  if (i < 0) return node.replaceChildren();
  const where = [["step", rows.step[i] < 0 ? "" : rows.step[i]], ["group", string(rows.group[i])],
    ["trajectory", string(rows.trajectory[i])], ["turn", rows.turn[i] > 0 ? rows.turn[i] : ""]];
  const size = lastRows(groupOf(i)).length;
  const tab = (name, text) => el("button", {type: "button", role: "tab", "aria-selected": String(mode === name),
    disabled: name === "group" && size < 2, onclick: () => { mode = name; drawDetail(); }}, text);
  const shades = COLOURS.map((one, n) => el("button", {type: "button", "data-colour": one.name, disabled: Boolean(one.missing),
    title: one.missing || `key ${n + 1}`, onclick: () => paint(one)}, one.name));
  node.replaceChildren(
    el("div", {class: "head"}, el("h2", {}, where.filter(([, v]) => v !== "").map(([n, v]) => `${n} ${v}`).join(" \u00b7 ") || "row " + i),
      el("div", {class: "buttons"}, el("button", {type: "button", onclick: () => move(-1), "aria-label": "previous"}, "\u2039"),
        el("button", {type: "button", onclick: () => move(1), "aria-label": "next"}, "\u203a"))),
    factsOf(i), ...callouts(i),
    el("div", {class: "bar-line"}, el("div", {class: "segments", role: "tablist"}, tab("rollout", "rollout"),
      tab("group", size > 1 ? "group of " + size : "no group")),
      el("div", {class: "segments", role: "group", "aria-label": "Colour of the tokens"}, ...shades)),
    el("div", {class: "colours"}, el("div", {class: "legend"})),
    ...(mode === "group" && size > 1 ? groupView(i) : [data.tokenizer ? null : messages(i), conversation(i)].filter(Boolean)));
  paint();
}

// -- the page ---------------------------------------------------------------------------------

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") { tip(null); document.activeElement.blur(); }
  if (event.target.closest("input, select, textarea")) return;
  const inList = event.target === $("list");
  const by = {j: 1, k: -1, ...(inList ? {ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -Infinity, End: Infinity} : {})}[event.key];
  const shade = COLOURS[Number(event.key) - 1];
  if (by) move(by === -Infinity ? -chosen.length : by === Infinity ? chosen.length : by);
  else if (event.key === "g" && current >= 0) { mode = mode === "group" ? "rollout" : "group"; drawDetail(); }
  else if (event.key === "/") $("text").focus();
  else if (shade && !shade.missing) paint(shade);
  else return;
  event.preventDefault();
}

function theme() {
  const dark = document.documentElement.dataset.theme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}

$("title").textContent = document.title = data.title;
$("facts").append(...Object.entries(data.facts).map(([name, value]) => el("span", {}, name + " ", el("b", {}, value))));
$("notices").append(...data.notices.map((text) => el("p", {class: "notice"}, text)));
$("theme").addEventListener("click", theme);
document.addEventListener("keydown", keys);
document.addEventListener("pointerover", (event) => {
  const span = event.target.closest(".t");
  if (span) tokenTip(span.token, event.clientX, event.clientY);
  else if (!event.target.closest(".plot")) tip(null);
});
drawCurves();
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
