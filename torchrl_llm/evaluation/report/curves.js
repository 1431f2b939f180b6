// Part of view.js that draws curves.
const cards = [];
const ends = data.panels.flatMap((panel) => panel.names.map((name) => columns[name + " steps"]));
const range = {low: least(ends.map((steps) => steps[0])), high: most(ends.map((steps) => steps[steps.length - 1]))};

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({length: last - first + 1}, (_, n) => (first + n) * step);
}

function seriesOf(panel) {
  const [heads, tails] = [0, 1].map((n) => new Set(panel.names.map((name) => name.split("/", 2)[n])));
  const named = (head, tail) => tails.size === 1 && heads.size > 1 ? head : heads.size === 1 ? tail : head + " " + tail;
  const found = panel.names.map((name, i) => {
    const points = new Map(), values = columns[name + " values"];
    columns[name + " steps"].forEach((step, k) => Number.isFinite(values[k]) && points.set(step, values[k]));
    return {name: panel.labels ? panel.labels[i] : named(...name.split("/", 2)).replace(/^tokens_/, "").replace(/_/g, " "), points: [...points],
      at: points, colour: `var(--c${i % 8})`, end: values[values.length - 1]};
  });
  // Fates that no token met would only fill the legend.
  return panel.title === data.ledger ? found.filter((one) => one.points.some((point) => point[1])) : found;
}

// Ends of an axis, as axis_limits of trainers/curves.py: what is smaller than its least span is noise.
function axisLimits(names, low, high) {
  const large = Math.max(Math.abs(low), Math.abs(high)) / 100, isRate = names.every((name) => /\blr$/.test(name));
  const span = isRate && large ? large : Math.max(large, 1e-3);
  if (high - low >= span) return [low, high];
  const bottom = (low + high - span) / 2;
  return low >= 0 && bottom < 0 ? [0, span] : [bottom, bottom + span];
}

function stack(series) {  // each on top of those before it: step, upper edge, lower edge
  const below = new Map();
  return series.map((one) => ({...one, points: one.points.map(([step, value]) => {
    const from = below.get(step) || 0;
    below.set(step, from + value);
    return [step, from + value, from];
  })}));
}

function outline(points, width) {  // at most two points a pixel: the lowest and the highest
  if (points.length <= 3 * width) return points;
  return Array.from({length: Math.ceil(width)}, (_, at) => {
    const bin = points.slice(Math.floor(at * points.length / width), Math.floor((at + 1) * points.length / width));
    return [bin.reduce((a, b) => b[1] < a[1] ? b : a, bin[0]), bin.reduce((a, b) => b[1] > a[1] ? b : a, bin[0])]
      .filter(Boolean).sort((a, b) => a[0] - b[0]);
  }).flat();
}

class Card {
  constructor(panel) {
    this.stacked = panel.title === data.ledger;
    this.series = seriesOf(panel);
    this.drawn = this.stacked ? stack(this.series) : this.series;
    [this.title, this.names] = [panel.title, panel.names];
    this.plot = el("div", {class: "plot"});
    const names = (one) => this.stacked || this.series.length > 1 ? [dot(one.colour), one.name + " "] : [];
    const legend = this.series.map((one) => el("span", {class: "series"}, ...names(one), el("b", {}, show(one.end))));
    const name = el("span", {class: "name", title: panel.names.join(", ")}, panel.title);
    this.node = el("figure", {class: "card"},
      el("figcaption", {}, name, el("span", {class: "legend"}, ...legend)), this.plot);
    this.at = null;
    cards.push(this);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  draw() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    if (!width || !this.series.length) return;
    const drawn = this.drawn, values = drawn.flatMap((one) => one.points.map((point) => point[1]));
    let low = least(values), high = most(values);
    if (this.stacked || (low >= 0 && low < high / 2)) low = Math.min(low, 0);
    [low, high] = axisLimits(this.names, low, high);
    const inner = {width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom};
    this.x = (step) => MARGIN.left + (step - range.low) / (range.high - range.low || 1) * inner.width;
    this.step = (x) => range.low + (x - MARGIN.left) / inner.width * (range.high - range.low);
    const y = (value) => MARGIN.top + (high - value) / (high - low) * inner.height;
    const at = (points, k) => outline(points, inner.width)
      .map((p) => `${this.x(p[0]).toFixed(1)} ${y(p[k]).toFixed(1)}`);
    const lines = [];
    for (const tick of ticks(low, high, 3)) {
      const told = String(Number(tick.toPrecision(6)));
      lines.push(svg("line", {class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick)}),
        svg("text", {class: "tick", x: MARGIN.left - 6, y: y(tick) + 3.5, "text-anchor": "end"},
          told.length > 5 ? show(tick) : told));
    }
    for (const tick of ticks(range.low, range.high || 1, Math.max(2, Math.round(inner.width / 70)))) {
      if (Number.isInteger(tick)) lines.push(svg("text",
        {class: "tick", x: this.x(tick), y: height - 4, "text-anchor": "middle"}, show(tick)));
    }
    for (const one of drawn) {
      if (!one.points.length) continue;
      const path = "M" + at(one.points, 1).join("L");
      lines.push(coloured(this.stacked
        ? svg("path", {class: "area", d: path + "L" + at(one.points, 2).reverse().join("L") + "Z"})
        : svg("path", {class: "line", d: path}), one.colour));
      if (one.points.length <= 24 && !this.stacked) lines.push(...one.points.map(([step, value]) =>
        coloured(svg("circle", {class: "point", cx: this.x(step), cy: y(value), r: 2}), one.colour)));
    }
    this.cursor = svg("line", {class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden"});
    const leave = () => this.point(null);
    this.plot.replaceChildren(svg("svg", {width, height, role: "img", tabindex: 0, "aria-label": this.title,
      onpointerleave: leave, onblur: leave, onclick: () => this.at !== null && chooseStep(this.at),
      onpointermove: (event) => this.point(Math.round(this.step(event.clientX - this.plot.getBoundingClientRect().left)),
        event.clientX, event.clientY),
      onkeydown: (event) => this.key(event)}, ...lines, this.cursor));
  }

  key(event) {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key], box = this.plot.getBoundingClientRect();
    if (event.key === "Enter" && this.at !== null) chooseStep(this.at);
    if (!by) return;
    event.preventDefault();
    const step = Math.max(range.low, Math.min(range.high, this.at === null ? range.high : this.at + by));
    this.point(step, box.left + this.x(step), box.top + box.height / 2);
  }

  point(step, x, y) {
    this.at = step === null ? null : Math.max(range.low, Math.min(range.high, step));
    for (const {cursor, x: place} of cards.filter((card) => card.cursor)) {
      cursor.setAttribute("visibility", this.at === null ? "hidden" : "visible");
      for (const end of ["x1", "x2"]) if (this.at !== null) cursor.setAttribute(end, place(this.at));
    }
    tip(this.at === null ? null : [["step", String(this.at)], ...this.series.map((one) =>
      [one.name, one.at.has(this.at) ? show(one.at.get(this.at)) : "\u2013", one.colour])], x, y);
  }
}

function drawCurves() {
  const draw = (node, panels) => node.append(...panels.map((panel) => new Card(panel).node));
  const [shown, more] = [false, true].map((later) => data.panels.filter((panel) => panel.more === later));
  $("curves").hidden = !data.panels.length;
  draw($("panels"), shown);
  $("more").hidden = !more.length;
  $("more").firstElementChild.textContent = counted(more.length, "more metric");
  $("more").addEventListener("toggle", () => draw($("panels-more"), more), {once: true});
}

function chooseStep(step) {
  if (!all.length) return;
  $("step-low").value = $("step-high").value = step;
  filter();
  $("rollouts").scrollIntoView({behavior: "smooth"});
}
