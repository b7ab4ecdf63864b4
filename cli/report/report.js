"use strict";
/* Draws the report's pictures and prompt tables. In: the JSON in #data. Out: SVG and table rows; every text is set as
   text, never as markup. Pictures are drawn again when their width changes, so their letters never scale. */

const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const steps = data.spans.map(([first, last]) => (first + last) / 2);
const stepNames = data.spans.map(([first, last]) => (first === last ? `step ${count(first)}` : `steps ${count(first)}–${count(last)}`));

// ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────
function count(value) { return value.toLocaleString("en-US", { maximumFractionDigits: 0 }); }

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7) return value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 4 });
  if (size >= 1000) return count(value);
  if (size >= 1e-3) return String(Number(value.toPrecision(4)));
  const [mantissa, exponent] = value.toExponential(1).split("e");
  const digits = [...String(Number(exponent))].map(c => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");
  return (mantissa.endsWith(".0") ? mantissa.slice(0, -2) : mantissa) + "×10" + digits;
}

function withUnit(value, unit) { return value === null || value === undefined ? "–" : number(value) + (unit ? ` ${unit}` : ""); }

function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = power * [1, 2, 5, 10].find(factor => factor * power >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) found.push(Number((i * size).toPrecision(12)));
  return found;
}

// ── elements ─────────────────────────────────────────────────────────────────────────────────────────────────────
function svg(name, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return node;
}

function html(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  node.append(...children);
  return node;
}

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? Math.max(4, x - 14 - box.width) : x + 14;
  const top = y + 14 + box.height > innerHeight ? Math.max(4, y - 14 - box.height) : y + 14;
  tip.style.transform = `translate(${left}px, ${top}px)`;
}

document.addEventListener("pointerover", event => {
  const owner = event.target.closest?.("[data-tip]");
  if (owner) showTip(owner.dataset.tip, event.clientX, event.clientY);
  else if (!event.target.closest?.("svg")) tip.hidden = true;
});

// ── one picture: axes, then marks ────────────────────────────────────────────────────────────────────────────────
/* `y` and `x` are {low, high, log}; returns the svg and the two scales. */
function frame(plot, height, x, y, { xTitle, xTicks, yTicks } = {}) {
  const width = plot.clientWidth;
  const bottom = xTitle ? 40 : 22;
  let low = y.low, high = y.high;
  if (!(high > low)) { const margin = Math.abs(low) * 0.1 || 1; low -= margin; high += margin; }
  const log = y.log ? Math.log10 : value => value;
  const marks = yTicks ?? (y.log ? decades(low, high) : ticks(low, high, height > 200 ? 5 : 4));
  if (!yTicks && !y.log && !y.exact) {  // whole grid lines around everything drawn
    const size = marks.length > 1 ? marks[1] - marks[0] : high - low;
    if (high > marks.at(-1) + size * 1e-6) marks.push(Number((marks.at(-1) + size).toPrecision(12)));
    if (low < marks[0] - size * 1e-6) marks.unshift(Number((marks[0] - size).toPrecision(12)));
    [low, high] = [marks[0], marks.at(-1)];
  }
  const labels = marks.map(mark => (mark.label ?? number(mark.at ?? mark)));
  const left = Math.ceil(Math.max(...labels.map(label => textWidth(label)), 12)) + 10;
  const box = { left, right: width - 12, top: 10, bottom: height - bottom };
  const toY = value => box.bottom - ((log(value) - log(low)) / (log(high) - log(low))) * (box.bottom - box.top);
  const span = x.high - x.low;
  const toX = value => (span > 0 ? box.left + ((value - x.low) / span) * (box.right - box.left) : (box.left + box.right) / 2);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": plot.closest("figure").querySelector("figcaption").textContent });
  marks.forEach((mark, i) => {
    const at = toY(mark.at ?? mark);
    if (mark.line !== false) root.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: at, y2: at }));
    root.append(svg("text", { x: box.left - 7, y: at + 4, "text-anchor": "end" }, labels[i]));
  });
  const across = xTicks ?? wholeTicks(x.low, x.high, Math.max(2, Math.floor((box.right - box.left) / 45)));
  let free = -Infinity;
  for (const mark of across) {
    const at = toX(mark.at ?? mark), label = mark.label ?? count(mark);
    const half = textWidth(label) / 2;
    const centre = Math.min(at, width - half);
    if (centre - half < free + 6) continue;
    free = centre + half;
    root.append(svg("text", { x: centre, y: box.bottom + 17, "text-anchor": "middle" }, label));
  }
  if (xTitle) root.append(svg("text", { x: (box.left + box.right) / 2, y: height - 3, "text-anchor": "middle" }, xTitle));
  plot.replaceChildren(root);
  return { root, toX, toY, box };
}

const pen = document.createElement("canvas").getContext("2d");
pen.font = "11.5px system-ui, sans-serif";
function textWidth(text) { return pen.measureText(text).width; }

function wholeTicks(low, high, most) {
  const found = ticks(low, Math.max(high, low + 1), most).filter(Number.isInteger).filter(value => value <= high);
  return found.length ? found : [Math.round(low)];
}

function decades(low, high) {
  const found = [];
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  for (let power = first; power <= last; power += Math.max(1, Math.ceil((last - first) / 3))) found.push(10 ** power);
  return found;
}

/* A vertical line that follows the pointer to the nearest of `xs`, with `say(index)` beside it. */
function follow({ root, toX, box }, xs, say) {
  if (!xs.length) return;
  const cursor = svg("line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
  root.append(cursor);
  const move = event => {
    const at = (event.clientX - root.getBoundingClientRect().left);
    let nearest = 0;
    xs.forEach((value, i) => { if (Math.abs(toX(value) - at) < Math.abs(toX(xs[nearest]) - at)) nearest = i; });
    cursor.setAttribute("x1", toX(xs[nearest])); cursor.setAttribute("x2", toX(xs[nearest]));
    cursor.setAttribute("visibility", "visible");
    showTip(say(nearest), event.clientX, event.clientY);
  };
  root.addEventListener("pointermove", move);
  root.addEventListener("pointerdown", move);
  root.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); tip.hidden = true; });
}

function linePath(xs, ys, toX, toY) {
  let path = "", pendown = false;
  xs.forEach((x, i) => {
    if (ys[i] === null) { pendown = false; return; }
    path += `${pendown ? "L" : "M"}${toX(x).toFixed(1)},${toY(ys[i]).toFixed(1)}`;
    pendown = true;
  });
  return path;
}

function drawSeries({ root, toX, toY }, xs, series, style) {
  if (series.low) {
    const kept = xs.map((_, i) => i).filter(i => series.low[i] !== null);
    const edge = (values, order) => order.map(i => `${toX(xs[i]).toFixed(1)},${toY(values[i]).toFixed(1)}`).join(" ");
    root.append(svg("polygon", { class: `band ${style}`, points: `${edge(series.high, kept)} ${edge(series.low, [...kept].reverse())}` }));
  }
  root.append(svg("path", { class: `line ${style}`, d: linePath(xs, series.mean, toX, toY) }));
  if (xs.length < 3) xs.forEach((x, i) => { if (series.mean[i] !== null) root.append(svg("circle", { class: style, r: 3.5, cx: toX(x), cy: toY(series.mean[i]) })); });
}

function extent(lists, from) {
  const values = lists.flat().filter(value => value !== null && value !== undefined);
  if (from !== undefined) values.push(from);
  return { low: Math.min(...values), high: Math.max(...values) };
}

function legend(figure, ...entries) {
  if (figure.querySelector(".legend")) return;
  const line = html("p", { class: "legend" });
  for (const [style, label] of entries) line.append(html("span", {}, html("i", { class: style }), label));
  figure.querySelector("figcaption").after(line);
}

function nothing(plot, sentence) { plot.replaceChildren(html("p", { class: "none" }, sentence)); }

// ── the pictures ─────────────────────────────────────────────────────────────────────────────────────────────────
const pictures = {
  progress(plot, height, figure) {
    const reward = data.metrics.reward ?? { mean: [] }, scores = data.held_out;
    if (!steps.length && !scores.length) return nothing(plot, "No optimizer step and no evaluation yet.");
    legend(figure, ["line b-accent", "mean reward of the rollouts (sampled)"], ...(scores.length ? [["dot b-second", "held-out score"]] : []));
    const xs = reward.mean.length ? steps : [];
    const ys = extent([reward.mean, scores.map(s => s.y), data.rewards]);
    const xHigh = Math.max(data.spans.at(-1)?.[1] ?? 0, ...scores.map(s => s.x));
    const view = frame(plot, height, { low: 0, high: xHigh }, ys, { xTitle: "optimizer step" });
    if (xs.length) drawSeries(view, xs, reward, "s0");
    view.root.append(svg("path", { class: "line s1", d: linePath(scores.map(s => s.x), scores.map(s => s.y), view.toX, view.toY) }));
    scores.forEach((score, i) => {
      const [cx, cy] = [view.toX(score.x), view.toY(score.y)];
      view.root.append(svg("circle", { class: "s1", r: 4.5, cx, cy }));
      if (i !== 0 && i !== scores.length - 1) return;
      const above = i !== 0 && cy - 14 > view.box.top;
      view.root.append(svg("text", { class: "label", x: i ? Math.min(cx, view.box.right) : cx + 9, y: above ? cy - 10 : i ? cy + 20 : cy + 16, "text-anchor": i ? "end" : "start" }, score.y.toFixed(3)));
    });
    const stops = [...new Set([...xs, ...scores.map(s => s.x)])].sort((a, b) => a - b);
    follow(view, stops, i => {
      const lines = [], at = xs.indexOf(stops[i]);
      if (at >= 0) lines.push(`${stepNames[at]}: reward ${number(reward.mean[at])}` + (reward.low ? ` (${number(reward.low[at])} to ${number(reward.high[at])})` : ""));
      for (const s of scores.filter(score => score.x === stops[i])) lines.push(`policy ${s.x}: ${s.text}`);
      return lines.join("\n");
    });
  },

  metric(plot, height, figure) {
    const found = data.metrics[figure.dataset.metric];
    if (!found) return nothing(plot, "Its shards could not be read.");
    const factor = Number(figure.dataset.factor), unit = figure.dataset.unit;
    const scaled = Object.fromEntries(Object.entries(found).map(([key, list]) => [key, list.map(v => (v === null ? null : v * factor))]));
    const ys = extent([scaled.mean, scaled.low ?? [], scaled.high ?? []]);
    if (!Number.isFinite(ys.low)) return nothing(plot, "No finite value.");
    if (ys.low === ys.high && steps.length > 1) return plot.replaceChildren(html("p", { class: "constant" }, withUnit(ys.low, unit), html("small", {}, " in every step")));
    ys.log = ys.low > 0 && ys.high / ys.low > 300;
    if (!ys.log && ys.low > 0 && ys.low < 0.6 * ys.high) ys.low = 0;
    if (ys.log) figure.querySelector("figcaption").title = "logarithmic scale";
    const view = frame(plot, height, { low: Math.min(steps[0], 1), high: steps.at(-1) }, ys);
    if (ys.log) view.root.append(svg("text", { x: view.box.right, y: view.box.top + 2, "text-anchor": "end" }, "log scale"));
    drawSeries(view, steps, scaled, "s0");
    follow(view, steps, i => `${stepNames[i]}: ${withUnit(scaled.mean[i], unit)}` + (scaled.low ? `\n${number(scaled.low[i])} to ${number(scaled.high[i])}` : ""));
  },

  levels(plot, height) {
    const { edges, shares } = data.levels;
    if (!shares.length) return nothing(plot, "No trained groups with differing rewards to show yet.");
    const rows = shares.length, xs = { low: data.spans[0][0] - 0.5, high: data.spans.at(-1)[1] + 0.5 };
    const yTicks = [0, rows / 2, rows].map(at => ({ at, label: number(edges[0] + (at / rows) * (edges[rows] - edges[0])), line: false }));
    const view = frame(plot, height, xs, { low: 0, high: rows }, { yTicks, xTitle: "optimizer step", xTicks: wholeTicks(1, data.spans.at(-1)[1], Math.max(2, plot.clientWidth / 80)) });
    const tall = (view.box.bottom - view.box.top) / rows;
    shares.forEach((row, level) => row.forEach((share, i) => {
      const left = view.toX(data.spans[i][0] - 0.5), right = view.toX(data.spans[i][1] + 0.5);
      if (share > 0) view.root.append(svg("rect", { class: "heat", x: left, width: Math.max(0.5, right - left - (right - left > 6 ? 1 : 0)), y: view.box.bottom - (level + 1) * tall, height: tall - 1, style: `--p: ${Math.round(8 + 92 * Math.sqrt(share))}` }));
    }));
    follow(view, steps, i => stepNames[i] + "\n" + shares.map((row, level) => [row[i], level]).filter(([share]) => share > 0).reverse()
      .map(([share, level]) => `reward ${number(edges[level])} to ${number(edges[level + 1])}: ${number(Math.round(1000 * share) / 10)} %`).join("\n"));
  },

  time(plot, height) {
    const phases = ["generate", "reward", "commit", "wait", "load", "train", "save", "publish", "idle"];
    const parts = phases.map(name => data.metrics[`${name}_seconds`]?.mean ?? steps.map(() => null));
    const totals = steps.map((_, i) => parts.reduce((sum, part) => sum + (part[i] ?? 0), 0));
    const round = data.metrics.round_seconds?.mean ?? [];
    if (!steps.length || !Math.max(...totals)) return nothing(plot, "No timed round yet.");
    const first = data.spans[0][0] - 0.5, last = data.spans.at(-1)[1] + 0.5;
    const view = frame(plot, height, { low: first, high: last }, extent([totals, round], 0), { xTitle: "optimizer step", xTicks: wholeTicks(1, data.spans.at(-1)[1], Math.max(2, plot.clientWidth / 80)) });
    data.spans.forEach(([from, to], i) => {
      const left = view.toX(from - 0.5), right = view.toX(to + 0.5), gap = right - left > 4 ? 1 : 0;
      let below = 0;
      parts.forEach((part, k) => {
        const value = part[i] ?? 0;
        if (value > 0) view.root.append(svg("rect", { class: `f-${phases[k]}`, x: left, width: right - left - gap, y: view.toY(below + value), height: Math.max(0, view.toY(below) - view.toY(below + value)) }));
        below += value;
      });
    });
    view.root.append(svg("path", { class: "thin", d: linePath(steps, round, view.toX, view.toY) }));
    follow(view, steps, i => `${stepNames[i]}: ${withUnit(round[i], "s")}\n` + phases.map((name, k) => [name, parts[k][i]]).filter(([, value]) => value > 0).reverse().map(([name, value]) => `${name} ${value.toFixed(value < 0.1 ? 3 : 2)} s`).join("\n"));
  },

  lags(plot, height) {
    const total = data.lags.reduce((sum, bar) => sum + bar.tokens, 0);
    if (!total) return nothing(plot, "No trained token could be read yet.");
    const shares = data.lags.map(bar => (100 * bar.tokens) / total);
    const xTicks = data.lags.map((bar, i) => ({ at: i + 0.5, label: bar.label }));
    const view = frame(plot, height, { low: 0, high: Math.max(4, data.lags.length) }, { low: 0, high: Math.max(...shares) }, { xTicks, xTitle: "versions behind" });
    data.lags.forEach((bar, i) => {
      const left = view.toX(i + 0.12), top = view.toY(shares[i]);
      view.root.append(svg("rect", { class: bar.over ? "mark over" : "mark", x: left, width: view.toX(i + 0.88) - left, y: top, height: view.box.bottom - top, rx: 2, "data-tip": `lag ${bar.label}${bar.over ? ", over the bound" : ""}: ${count(bar.tokens)} tokens` }));
      if (bar.tokens && data.lags.length <= 10) view.root.append(svg("text", { class: "value", x: view.toX(i + 0.5), y: top - 5, "text-anchor": "middle" }, `${number(Number(shares[i].toPrecision(3)))} %`));
    });
  },

  staleness(plot, height, figure) {
    const mean = data.metrics.staleness_mean, most = data.metrics.staleness_max;
    if (!mean || !most) return nothing(plot, "No step yet.");
    legend(figure, ["line b-accent", "mean of the step's tokens"], ["line b-second", "oldest token"]);
    const top = most.high ?? most.mean;
    const view = frame(plot, height - 26, { low: Math.min(steps[0], 1), high: steps.at(-1) }, extent([mean.mean, top, [1]], 0), { xTitle: "optimizer step" });
    drawSeries(view, steps, { mean: top }, "s1");
    drawSeries(view, steps, { mean: mean.mean }, "s0");
    follow(view, steps, i => `${stepNames[i]}: mean ${number(mean.mean[i])}, at most ${number(top[i])}` + (data.metrics.masked_stale_fraction?.mean[i] ? `\n${number(100 * data.metrics.masked_stale_fraction.mean[i])} % masked` : ""));
  },

  shards(plot, height, figure) {
    const { head, tail, trained_first, trained_last, width: [width] } = data.shards;
    if (!head.length) return nothing(plot, "No shard yet.");
    legend(figure, ["b-accent", "sampled by versions"], ["line b-second", "version being trained when it was used"]);
    const xs = head.map((_, i) => i * width + (width + 1) / 2);
    const ys = extent([head, tail, trained_first, trained_last]);
    if (!Number.isFinite(ys.low)) return nothing(plot, "No shard holds a sampled token.");
    if (ys.low === ys.high) { ys.low = Math.max(0, ys.low - 1); ys.high += 1; }
    const yTicks = wholeTicks(ys.low, ys.high, 5).map(at => ({ at, label: count(at) }));
    const view = frame(plot, height - 26, { low: 0.5, high: head.length * width + 0.5 }, ys, { yTicks, xTitle: "training shard", xTicks: wholeTicks(1, head.length * width, Math.max(2, plot.clientWidth / 80)) });
    const wide = Math.max(1.5, (0.72 * (view.box.right - view.box.left)) / head.length);
    xs.forEach((x, i) => {
      if (head[i] !== null) { const bottom = view.toY(head[i]) + 3, upper = view.toY(tail[i]) - 3; view.root.append(svg("rect", { class: "mark", x: view.toX(x) - wide / 2, width: wide, y: upper, height: bottom - upper, rx: 2 })); }
      if (trained_first[i] !== null) view.root.append(svg("line", { class: "s1", "stroke-width": 2, x1: view.toX(x), x2: view.toX(x), y1: view.toY(trained_first[i]) - 1.5, y2: view.toY(trained_last[i]) + 1.5 }), svg("line", { class: "s1", "stroke-width": 2, x1: view.toX(x) - wide / 2, x2: view.toX(x) + wide / 2, y1: view.toY(trained_last[i]), y2: view.toY(trained_last[i]) }));
    });
    const range = (first, last) => (first === null ? "none" : first === last ? count(first) : `${count(first)}–${count(last)}`);
    follow(view, xs, i => (width > 1 ? `shards ${count(i * width + 1)}–${count((i + 1) * width)}` : `shard ${count(i + 1)}`) + `\nsampled by policy ${range(head[i], tail[i])}\nused to train policy ${range(trained_first[i], trained_last[i])}`);
  },
};

function draw(plot) {
  if (plot.clientWidth === plot.drawn || plot.clientWidth < 80) return; // nothing new, or not laid out
  plot.drawn = plot.clientWidth;
  const figure = plot.closest("figure");
  try {
    pictures[figure.dataset.chart](plot, Number(figure.dataset.height), figure);
  } catch (error) { // one picture less must not cost the others
    console.error(error);
    nothing(plot, `This picture could not be drawn: ${error.message}`);
  }
}

// In the next frame: drawing changes heights, which the observer must not see while it still reports.
const redraw = new ResizeObserver(entries => requestAnimationFrame(() => entries.forEach(({ target }) => draw(target))));
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const plot = html("div", { class: "plot" });
  figure.append(plot);
  draw(plot);
  redraw.observe(plot);
}

// ── prompt histories ─────────────────────────────────────────────────────────────────────────────────────────────
const [lowest, highest] = data.rewards;
const scaled = value => (highest > lowest ? (100 * (value - lowest)) / (highest - lowest) : 50);
const PAGE = 40;

function history(card) {
  const { unit, columns, rows } = data.histories[card.dataset.history];
  const table = card.querySelector("table"), search = card.querySelector("input"), kind = card.querySelector("select");
  const more = card.querySelector("button"), said = card.querySelector("output");
  const keys = [["prompt", "id", ""], ["mean", "mean", "right"], ["change", "change", "right change"]];
  let sorted = { key: "mean", up: true }, limit = PAGE;

  function compare(a, b) {
    const [x, y] = [a[sorted.key], b[sorted.key]];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return sorted.up ? order : -order;
  }

  function cell(value, column, id) {
    const box = html("td", { class: "c" });
    if (value === null) return box;
    const inner = html("div", { class: "cell", "data-tip": `${id}\n${unit} ${columns[column]}: ${value === "x" ? "every attempt failed" : `reward ${number(value)}`}` }, value === "x" ? "×" : columns.length <= 12 ? number(Number(value.toFixed(2))) : "");
    if (value !== "x") { inner.classList.add("scored"); inner.style.setProperty("--p", scaled(value)); }
    box.append(inner);
    return box;
  }

  function draw() {
    const wanted = search.value.trim().toLowerCase();
    const found = rows.filter(row => (!kind.value || row.kind === kind.value) && (!wanted || `${row.id} ${row.text}`.toLowerCase().includes(wanted))).sort(compare);
    const head = html("tr");
    for (const [label, key, style] of keys) {
      const button = html("button", { type: "button" }, label + (sorted.key === key ? (sorted.up ? " ▲" : " ▼") : ""));
      button.addEventListener("click", () => { sorted = { key, up: sorted.key === key ? !sorted.up : true }; draw(); });
      const th = html("th", { class: style }, button);
      if (sorted.key === key) th.setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
      head.append(th);
    }
    columns.forEach((label, i) => {
      const sparse = columns.length > 12 && i % Math.ceil(columns.length / 10) !== 0;
      head.append(html("th", { class: "c", "data-tip": `${unit} ${label}` }, sparse ? "" : label));
    });
    const body = html("tbody");
    for (const row of found.slice(0, limit)) {
      const sign = row.change > 0 ? "+" : row.change < 0 ? "−" : "";
      body.append(html("tr", {},
        html("td", { class: "prompt", title: `${row.id}  ${row.text}` }, html("code", {}, row.id), html("span", {}, row.text)),
        html("td", { class: "number" }, row.mean === null ? "–" : row.mean.toFixed(2)),
        html("td", { class: "number change" }, row.change === null ? "–" : sign + Math.abs(row.change).toFixed(2)),
        ...row.cells.map((value, i) => cell(value, i, row.id))));
    }
    table.classList.toggle("few", columns.length <= 12);
    table.replaceChildren(html("thead", {}, head), body);
    said.textContent = `${count(Math.min(limit, found.length))} of ${count(found.length)} shown`;
    more.hidden = found.length <= limit;
  }

  search.addEventListener("input", () => { limit = PAGE; draw(); });
  kind.addEventListener("change", () => { limit = PAGE; draw(); });
  more.addEventListener("click", () => { limit += 5 * PAGE; draw(); });
  draw();
}
for (const card of document.querySelectorAll("[data-history]")) if (card.querySelector("table")) history(card);
