"use strict";
/* What every part of the page uses: elements, numbers, the data, pictures. Texts from runs are untrusted: elements get
   them as text nodes, and pictures through `plain`; nothing here parses markup. */

const inlined = JSON.parse(document.getElementById("data").textContent);   // null: there is a server
const main = document.querySelector("main"), tip = document.getElementById("tip");

// ── elements ─────────────────────────────────────────────────────────────────────────────────────────────────────────
/* An element; attributes that begin with `on` are listeners, children that are null are left out, strings are text. */
function h(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [property, set] of Object.entries(value)) node.style.setProperty(property, set);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.flat(9).filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

const dim = (...children) => h("p", { class: "dim" }, ...children);
const none = sentence => h("p", { class: "none" }, sentence);
const note = sentence => h("p", { class: "note" }, visible(sentence));
const code = text => h("code", {}, text);
/** The name of a setting, which breaks at its dots and underscores if there is no room. */
const settingName = name => h("code", { class: "name" }, ...name.split(/(?<=[._])/).flatMap(part => [part, h("wbr")]));
const option = (value, label = value) => h("option", { value }, label);

/* Control characters as their pictures (␀), so that they are seen and cannot disturb the page. */
function visible(text) {
  return String(text).replace(/[\x00-\x08\x0b-\x1f\x7f]/g, c => (c === "\x7f" ? "␡" : String.fromCharCode(0x2400 + c.charCodeAt(0))));
}

/* A table; `right` are the columns with numbers. Cells are text or elements. */
function table(heads, rows, { right = [], style = "" } = {}) {
  const align = i => (right.includes(i) ? "right" : null);
  return h("table", { class: style },
    heads.length ? h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { class: align(i) }, head)))) : null,
    h("tbody", {}, rows.map(row => h("tr", {}, row.map((cell, i) => h("td", { class: align(i) }, cell))))));
}

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth ? Math.max(4, x - 14 - box.width) : x + 14;
  const top = y + 14 + box.height > innerHeight ? Math.max(4, y - 14 - box.height) : y + 14;
  tip.style.transform = `translate(${left}px, ${top}px)`;
}
for (const name of ["pointerover", "focusin"]) document.addEventListener(name, event => {
  const owner = event.target.closest?.("[data-tip]"), box = owner?.getBoundingClientRect();
  if (owner) showTip(owner.dataset.tip, event.clientX ?? box.right, event.clientY ?? box.bottom);
  else tip.hidden = true;
});
document.addEventListener("keydown", event => { if (event.key === "Escape") tip.hidden = true; });

// ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
const isNumber = value => value !== null && value !== undefined && Number.isFinite(value);
const count = value => value.toLocaleString("en-US", { maximumFractionDigits: 0 });
const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
const amount = value => (value < 1e7 ? count(value) : value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 4 }));
const percent = share => (share > 0 && share < 0.1 ? `${(100 * share).toFixed(1)} %` : `${(100 * share).toFixed(0)} %`);
const fixed = (value, digits = 3) => (isNumber(value) ? value.toFixed(digits).replace("-", "−") : "–");

function number(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7) return amount(value);
  if (size >= 1000) return count(value);
  if (size >= 1e-3) return String(Number(value.toPrecision(4))).replace("-", "−");
  const [mantissa, exponent] = value.toExponential(1).split("e");
  const digits = [...String(Number(exponent))].map(c => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");
  return `${mantissa.replace(".0", "").replace("-", "−")}×10${digits}`;
}

function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours ? `${count(hours)} h ${minutes % 60} min` : `${minutes} min ${Math.round(seconds % 60)} s`;
}

function ago(seconds) {
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (Math.abs(seconds) >= length) return `${Math.round(Math.abs(seconds) / length)} ${unit} ${seconds > 0 ? "ago" : "ahead of this clock"}`;
  return "just now";
}

const date = seconds => (seconds ? new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") + " UTC" : "not started");
const withError = score => fixed(score.score) + (isNumber(score.standard_error) ? ` ± ${fixed(score.standard_error)}` : "");

// ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
const answers = new Map();   // address → what the server said last, and its tag
let waited = 0;   // for answers, in milliseconds

/* A part of the data, from the report itself or from the server; `path` is such as ["runs", name, "steps"]. */
async function get(path, query = {}) {
  if (inlined) {
    const value = inlined[path.join("/")];
    if (value === undefined) throw new Error("a report does not hold this");
    return value;
  }
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== false));
  const address = `/api/${path.map(encodeURIComponent).join("/")}${asked.size ? `?${asked}` : ""}`;
  const known = answers.get(address);
  const begun = performance.now();
  const response = await ask(address, { cache: "no-store", headers: known ? { "If-None-Match": known.tag } : {} });
  waited += performance.now() - begun;
  if (response.status === 304) return known.value;
  const value = await answerOf(response);
  if (response.headers.has("ETag") && !asked.size) answers.set(address, { tag: response.headers.get("ETag"), value });
  return value;
}

async function post(path, body) {
  const headers = { "Content-Type": "application/json", "X-Millrace": "ui" };
  return answerOf(await ask(`/api/${path.map(encodeURIComponent).join("/")}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

const AWAY = 503;   // the server's status while its store does not answer, and that of a server which is gone

function ask(address, options) {
  return fetch(address, options).catch(() => { throw Object.assign(new Error("the server of this page does not answer; `millrace ui` may have ended"), { status: AWAY }); });
}

async function answerOf(response) {
  const value = await response.json().catch(() => ({}));
  if (response.ok) return value;
  const error = new Error(typeof value.error === "string" ? value.error : `the server answers ${response.status}`);
  error.status = response.status;
  throw error;
}

/* A run's metrics over steps; `update` fetches the points that are new. */
class Steps {
  constructor(run) { Object.assign(this, { run, width: 0, spans: [], times: [], metrics: {} }); }

  async update() {
    const part = await get(["runs", this.run, "steps"], inlined ? {} : { first: this.spans.length, width: this.width });
    const kept = part.first, before = this.spans.length;
    this.width = part.width;
    this.spans = this.spans.slice(0, kept).concat(part.spans);
    this.times = this.times.slice(0, kept).concat(part.times);
    for (const name of new Set([...Object.keys(this.metrics), ...Object.keys(part.metrics)])) {
      const old = this.metrics[name] ?? {}, more = part.metrics[name] ?? {};
      const rest = part.spans.map(() => null), gap = Array(kept).fill(null);
      this.metrics[name] = Object.fromEntries(["mean", "low", "high"].filter(key => old[key] || more[key])
        .map(key => [key, (old[key] ?? gap).slice(0, kept).concat(more[key] ?? rest)]));
    }
    return this.spans.length !== before || kept !== before || part.spans.length > 0;
  }

  get places() { return this.spans.map(([first, last]) => (first + last) / 2); }
}

// ── pictures ─────────────────────────────────────────────────────────────────────────────────────────────────────────
/* Text for plotly, which reads some markup in labels: as itself. */
const plain = text => visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = i => css(`--s${i % 8}`);
const faint = (shade, alpha) => `rgba(${[1, 3, 5].map(i => parseInt(shade.slice(i, i + 2), 16))}, ${alpha})`;   // of #rrggbb
const pictures = new Set();
/* The library of charts is read while the data comes; pictures wait for it. */
const charts = window.Plotly ? Promise.resolve() : new Promise(ready => document.getElementById("plotly").addEventListener("load", ready));
const onScreen = new IntersectionObserver(entries => entries.forEach(({ target, isIntersecting }) => {
  target.isSeen = isIntersecting;
  if (isIntersecting && target.isStale) draw(target);
}), { rootMargin: "400px 0px" });

/* A figure with a caption; `make` returns {traces, layout}, or a sentence or an element if there is nothing to draw. It is drawn when
   it comes near the screen, and again when its data or the colours change. */
function picture(title, { unit = "", meaning = "", height = 170, make, style = "" }) {
  const plot = h("div", { class: "plot", style: { height: `${height}px` } });
  const caption = h("figcaption", {}, title, unit ? h("small", {}, ` ${unit}`) : null,
    meaning ? h("button", { type: "button", class: "why", "aria-label": `What is ${title}?`, "data-tip": meaning }, "?") : null);
  Object.assign(plot, { make, isStale: true, isSeen: false });
  pictures.add(plot);
  onScreen.observe(plot);
  return h("figure", { class: `card ${style}` }, caption, plot);
}

function draw(plot) {
  plot.isStale = false;
  if (!window.Plotly) return void charts.then(() => draw(plot));
  try {
    const made = plot.make();
    if (!made.traces) {
      if (plot.isDrawn) Plotly.purge(plot);
      plot.isDrawn = false;
      plot.replaceChildren(typeof made === "string" ? none(made) : made);
      return;
    }
    if (!plot.isDrawn) plot.replaceChildren();
    plot.isDrawn = true;
    Plotly.react(plot, made.traces, layoutOf(made.layout), { responsive: true, displayModeBar: false, showTips: false, doubleClick: "reset" });
  } catch (error) { // one picture less must not cost the others
    console.error(error);
    plot.replaceChildren(none(`This picture could not be drawn: ${error.message}`));
  }
}

function redraw() {
  for (const plot of pictures) {
    if (!plot.isConnected) { onScreen.unobserve(plot); if (plot.isDrawn) Plotly.purge(plot); pictures.delete(plot); continue; }
    plot.isStale = true;
    if (plot.isSeen) draw(plot);
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("beforeprint", () => pictures.forEach(draw));

function layoutOf({ xaxis = {}, yaxis = {}, margin = {}, ...more } = {}) {
  const line = css("--line"), axis = { gridcolor: line, linecolor: line, zeroline: false, automargin: true, ticklen: 3, tickcolor: line };
  return {
    font: { family: css("--sans"), size: 11.5, color: css("--dim") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, uirevision: "kept",
    margin: { l: 40, r: 10, t: 6, b: 28, ...margin }, hovermode: "x unified",
    hoverlabel: { bgcolor: css("--card"), bordercolor: line, font: { color: css("--ink"), size: 12 } },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 } },
    xaxis: { ...axis, showgrid: false, ...xaxis }, yaxis: { ...axis, nticks: 6, exponentformat: "power", ...yaxis }, ...more,
  };
}
