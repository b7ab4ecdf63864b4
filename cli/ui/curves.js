/* What is drawn over steps: metrics, of one run or of several laid over each other; a round's time; who worked when. */

const choice = { smoothing: 0, x: "step", filter: "" };   // of the person, for every curve
const AXES = { step: "optimizer step", hours: "hours", tokens: "trained tokens" };

/* Places of a run's points on the axis that was chosen. */
function axisOf(steps) {
  if (choice.x === "hours") return steps.times.map(time => (time - steps.times[0]) / 3600);
  if (choice.x === "tokens") {
    let sum = 0;
    return steps.spans.map(([first, last], i) => (sum += (steps.metrics.trained_tokens?.mean[i] ?? 0) * (last - first + 1)));
  }
  return steps.places;
}

/* Exponential moving average without the bias of its beginning, as TensorBoard and W&B draw it. */
function smooth(values, weight) {
  let last = 0, debias = 0;
  return values.map(value => {
    if (!isNumber(value)) return null;
    last = weight * last + (1 - weight) * value;
    debias = weight * debias + (1 - weight);
    return last / debias;
  });
}

/* A line, and behind it what it smooths or the lowest and highest of each span. */
function lines(xs, curve, { name, shade, factor = 1, axis }) {
  const scaled = list => list.map(value => (isNumber(value) ? value * factor : null));
  const mean = scaled(curve.mean), traces = [], look = { type: "scatter", x: xs, hoverinfo: "skip", showlegend: false, yaxis: axis };
  if (curve.low && curve.high) {
    traces.push({ ...look, y: scaled(curve.high), mode: "lines", line: { width: 0 } });
    traces.push({ ...look, y: scaled(curve.low), mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: faint(shade, 0.15) });
  }
  if (choice.smoothing > 0) traces.push({ ...look, y: mean, mode: "lines", line: { color: faint(shade, 0.25), width: 1 } });
  const few = mean.filter(isNumber).length < 3;
  traces.push({ type: "scatter", x: xs, y: choice.smoothing > 0 ? smooth(mean, choice.smoothing) : mean, name: plain(name), yaxis: axis,
    mode: few ? "lines+markers" : "lines", line: { color: shade, width: 1.8 }, marker: { color: shade, size: 6 }, hovertemplate: "%{y:.4~g}", connectgaps: true });
  return traces;
}

/* One metric of every run. `runs` are {name, steps, shade}. */
function metricPicture(name, { title, unit, factor, meaning }, runs) {
  return picture(title, { unit, meaning: `${name}: ${meaning || "recorded by this run's own code"}`, make() {
    const drawn = runs.filter(run => run.steps.metrics[name]);
    const values = drawn.flatMap(run => ["mean", "low", "high"].flatMap(key => run.steps.metrics[name][key] ?? [])).filter(isNumber);
    if (!values.length) return "No finite value.";
    const low = Math.min(...values) * factor, high = Math.max(...values) * factor;
    if (low === high && values.length > 1) return h("p", { class: "constant" }, number(low), h("small", {}, `${unit ? ` ${unit}` : ""} in every step`));
    const wide = low > 0 && high / low > 300;
    const yaxis = wide ? { type: "log", nticks: 5 } : low > 0 && low < 0.6 * high ? { rangemode: "tozero" } : {};
    const traces = drawn.flatMap(run => lines(axisOf(run.steps), run.steps.metrics[name], { name: runs.length > 1 ? run.name : title, shade: run.shade, factor }));
    return { traces, layout: { yaxis, xaxis: { hoverformat: ",~r" } } };
  } });
}

/* Every metric under the headings of docs/metrics.md, in their order. */
function curvesOf(runs, sections, card) {
  const left = new Set(runs.flatMap(run => Object.keys(run.steps.metrics)));
  const groups = sections.map(section => ({ ...section, pictures: section.metrics.flatMap(metric => {
    const pattern = new RegExp(`^${metric.match}$`);
    return [...left].filter(name => pattern.test(name)).sort((a, b) => a.localeCompare(b, "en", { numeric: true })).map(name => {
      left.delete(name);
      const words = pattern.exec(name).slice(1).reduce((title, part) => title.replace(/<\w+>/, part), metric.title);
      return [name, { ...metric, title: words }];
    });
  }) }));
  groups.push({ title: "Others", folded: false, pictures: [...left].sort().map(name => [name, { title: name, unit: "", factor: 1, meaning: "" }]) });
  const box = h("div", { class: "headings" });
  const fill = () => {
    const wanted = choice.filter.trim().toLowerCase();
    box.replaceChildren(...groups.map(group => {
      const found = group.pictures.filter(([name, { title }]) => `${name} ${title}`.toLowerCase().includes(wanted));
      if (!found.length) return "";
      const grid = h("div", { class: "grid" });
      const open = () => { if (!grid.childElementCount) grid.append(...found.map(([name, metric]) => metricPicture(name, metric, runs))); };
      if (!group.folded || wanted) open();
      return h("details", { class: "heading", open: !group.folded || Boolean(wanted), ontoggle: open },
        h("summary", {}, group.title, h("small", {}, ` ${found.length}`)), grid);
    }));
  };
  fill();
  const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: choice.smoothing, "aria-label": "Smoothing",
    oninput: event => { choice.smoothing = Number(event.target.value); shown.textContent = choice.smoothing.toFixed(2); redraw(); } });
  const shown = h("output", {}, choice.smoothing.toFixed(2));
  const axes = h("select", { "aria-label": "Horizontal axis", onchange: event => { choice.x = event.target.value; redraw(); } },
    Object.entries(AXES).map(([value, label]) => option(value, label)));
  axes.value = choice.x;
  const filter = h("input", { type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics", value: choice.filter,
    oninput: event => { choice.filter = event.target.value; fill(); } });
  card.append(h("div", { class: "tools" }, h("label", {}, "smoothing ", slider, " ", shown), h("label", {}, "over ", axes), filter), box);
  return fill;
}

/* Reward of every step and held-out scores with their standard errors; `runs` also have `scores`. */
function progressPicture(runs) {
  return picture("Reward and held-out score", { unit: "a score stands at the policy version its step made", height: 300, make() {
    const traces = [];
    for (const { name, steps, scores, shade, second } of runs) {
      const label = text => (runs.length > 1 ? `${name}: ${text}` : text);
      if (steps.metrics.reward && steps.spans.length) traces.push(...lines(axisOf(steps), steps.metrics.reward, { name: label("mean reward of the rollouts"), shade }).map((trace, i, all) => ({ ...trace, showlegend: i === all.length - 1 })));
      const xs = axisOf(steps), place = version => (choice.x === "step" ? version : version ? xs[Math.ceil(version / (steps.width || 1)) - 1] ?? null : 0);
      for (const split of new Set(scores.map(score => score.split))) {
        const own = scores.filter(score => score.split === split);
        traces.push({ type: "scatter", mode: "lines+markers", x: own.map(score => place(score.version)), y: own.map(score => score.score), name: plain(label(`held-out score, ${split}`)),
          error_y: { type: "data", array: own.map(score => score.standard_error ?? 0), color: second, thickness: 1.2, width: 3 },
          line: { color: second, width: 1.6, dash: runs.length > 1 ? "dot" : "solid" }, marker: { color: second, size: 7, line: { color: css("--card"), width: 1.5 } },
          text: own.map(score => plain(`policy ${score.version}: ${score.text}`)), hovertemplate: "%{text}<extra></extra>" });
      }
    }
    if (!traces.length) return "No optimizer step and no evaluation yet.";
    return { traces, layout: { showlegend: true, margin: { t: 26 }, xaxis: { title: { text: AXES[choice.x], standoff: 6 }, hoverformat: ",~r" } } };
  } });
}

function environmentsPicture(environments) {
  return picture("Reward by environment", { unit: "mean reward of the trained groups whose task ids begin with it", height: 240, make() {
    const xs = environments.spans.map(([first, last]) => (first + last) / 2);
    const traces = Object.entries(environments.rewards).flatMap(([name, curve], i) => lines(xs, curve, { name: name || "others", shade: color(i) })
      .map((trace, k, all) => ({ ...trace, showlegend: k === all.length - 1 })));
    return { traces, layout: { showlegend: true, margin: { t: 26 }, xaxis: { title: { text: AXES.step, standoff: 6 } } } };
  } });
}

const MOST_BARS = 240;

/* Means of neighbours, so that there are at most `MOST_BARS` values. */
function merged(values) {
  const width = Math.ceil(values.length / MOST_BARS) || 1;
  return Array.from({ length: Math.ceil(values.length / width) }, (_, i) => {
    const there = values.slice(i * width, (i + 1) * width).filter(isNumber);
    return there.length ? there.reduce((sum, value) => sum + value, 0) / there.length : null;
  });
}

function timePicture(steps, phases) {
  return picture("Where a round's time went", { unit: "seconds per round; dashed: wall-clock of the round", height: 290, make() {
    const xs = merged(steps.places);
    const traces = phases.filter(name => steps.metrics[`${name}_seconds`]?.mean.some(value => value > 0)).map(name => ({
      type: "bar", x: xs, y: merged(steps.metrics[`${name}_seconds`].mean), name, marker: { color: css(`--${name}`), line: { width: 0 } }, hovertemplate: "%{y:.3~f} s" }));
    if (!traces.length) return "No timed round yet.";
    if (steps.metrics.round_seconds) traces.push({ type: "scatter", mode: "lines", x: xs, y: merged(steps.metrics.round_seconds.mean), name: "round", line: { color: css("--ink"), width: 1.2, dash: "dash" }, hovertemplate: "%{y:.3~f} s" });
    return { traces, layout: { barmode: "stack", bargap: xs.length > 80 ? 0 : 0.12, xaxis: { title: { text: AXES.step, standoff: 6 } } } };
  } });
}

/* Bars of what trainer, engines and rollout workers did, below each other. */
function lanesPicture(found) {
  return picture("Who worked when", { unit: `seconds; rounds ${count(found.first)} to ${count(found.last)}`, height: 90 + 34 * found.lanes.length, make() {
    if (!found.lanes.length) return "Nothing yet.";
    const start = Math.min(...found.lanes.flatMap(lane => lane.bars.map(bar => bar.start)));
    const kinds = [...new Set(found.lanes.flatMap(lane => lane.bars.map(bar => bar.what)))];
    const traces = kinds.map(kind => {
      const bars = found.lanes.flatMap(lane => lane.bars.filter(bar => bar.what === kind).map(bar => ({ ...bar, lane: plain(lane.name) })));
      return { type: "bar", orientation: "h", name: kind, y: bars.map(bar => bar.lane), base: bars.map(bar => bar.start - start), x: bars.map(bar => Math.max(bar.seconds, 1e-3)),
        marker: { color: css(`--${kind}`), line: { width: 0 } }, text: bars.map(bar => plain(`${bar.label}: ${kind} ${bar.seconds.toFixed(3)} s`)), textposition: "none", hovertemplate: "%{text}<extra></extra>" };
    });
    return { traces, layout: { barmode: "overlay", bargap: 0.25, hovermode: "closest", showlegend: true, margin: { t: 26 },
      yaxis: { autorange: "reversed", showgrid: false, nticks: undefined, fixedrange: true }, xaxis: { showgrid: true } } };
  } });
}

// ── from the shards ──────────────────────────────────────────────────────────────────────────────────────────────────
function lagPicture({ lags }) {
  return picture("Trained tokens by lag", { unit: "% of tokens", height: 240, make() {
    const total = lags.reduce((sum, bar) => sum + bar.tokens, 0);
    if (!total) return "No trained token could be read yet.";
    const shares = lags.map(bar => (100 * bar.tokens) / total);
    return { traces: [{ type: "bar", x: lags.map(bar => bar.label), y: shares, marker: { color: lags.map(bar => css(bar.over ? "--second" : "--accent")) },
      text: shares.map(share => `${number(Number(share.toPrecision(3)))} %`), textposition: "auto", cliponaxis: false,
      hovertext: lags.map(bar => `lag ${bar.label}${bar.over ? ", over the bound" : ""}: ${count(bar.tokens)} tokens`), hoverinfo: "text" }],
      layout: { hovermode: "closest", bargap: 0.3, xaxis: { type: "category", title: { text: "versions behind", standoff: 6 } } } };
  } });
}

function stalenessPicture(steps) {
  return picture("Lag over steps", { unit: "policy versions", height: 240, make() {
    const { staleness_mean: mean, staleness_max: most, masked_stale_fraction: masked } = steps.metrics;
    if (!mean || !most) return "No step with a trained token yet.";
    const traces = [[{ mean: most.high ?? most.mean }, "oldest token", css("--second")], [{ mean: mean.mean }, "mean of the step's tokens", css("--accent")]]
      .flatMap(([curve, name, shade]) => lines(steps.places, curve, { name, shade }).slice(-1)).map(trace => ({ ...trace, showlegend: true }));
    if (masked?.mean.some(value => value > 0)) traces.push(...lines(steps.places, masked, { name: "share masked", shade: css("--dim") }).slice(-1).map(trace => ({ ...trace, showlegend: true })));
    return { traces, layout: { showlegend: true, margin: { t: 26 }, yaxis: { rangemode: "tozero" }, xaxis: { title: { text: AXES.step, standoff: 6 } } } };
  } });
}

function shardsPicture({ shards }) {
  const { head, tail, trained_first: first, trained_last: last, width: [width] } = shards;
  return picture("Policy versions in each shard", { unit: width > 1 ? `in commit order, ${width} shards per mark` : "in commit order", height: 250, make() {
    if (!head.some(isNumber)) return "No shard holds a sampled token.";
    const xs = head.map((_, i) => i * width + (width + 1) / 2);
    const range = (a, b) => (!isNumber(a) ? "none" : a === b ? count(a) : `${count(a)}–${count(b)}`);
    const bars = (low, high, thick, name, shade) => ({ type: "bar", x: xs, base: low.map(v => (isNumber(v) ? v - 0.2 : null)), y: low.map((v, i) => (isNumber(v) ? high[i] - v + 0.4 : null)),
      width: Math.max(0.5, thick * width), name, marker: { color: shade }, hovertext: xs.map((_, i) => `${name} ${range(low[i], high[i])}`), hoverinfo: "text" });
    return { traces: [bars(head, tail, 0.7, "sampled by versions", css("--accent")), bars(first, last, 0.25, "version being trained when it was used", css("--second"))],
      layout: { barmode: "overlay", showlegend: true, margin: { t: 26 }, xaxis: { title: { text: "training shard", standoff: 6 } } } };
  } });
}

function levelsPicture({ levels: { edges, shares }, spans }) {
  return picture("How hard the prompts were", { unit: "share of each step's groups by mean reward; the stronger the colour, the more", height: 230, make() {
    if (!shares.length) return "No trained groups with differing rewards to show yet.";
    const middles = edges.slice(1).map((edge, i) => (edge + edges[i]) / 2);
    return { traces: [{ type: "heatmap", x: spans.map(([a, b]) => (a + b) / 2), y: middles, z: shares.map(row => row.map(share => (share > 0 ? Math.sqrt(share) : null))), customdata: shares.map(row => row.map(share => 100 * share)),
      colorscale: [[0, faint(css("--heat"), 0.08)], [1, css("--heat")]], zmin: 0, zmax: 1, showscale: false, ygap: 1, xgap: spans.length > 100 ? 0 : 1, hoverongaps: false,
      hovertemplate: "step %{x}: reward about %{y:.3~g}: %{customdata:.1f} % of groups<extra></extra>" }],
      layout: { hovermode: "closest", yaxis: { showgrid: false }, xaxis: { title: { text: AXES.step, standoff: 6 } } } };
  } });
}

function lengthPictures({ lengths, spans }) {
  const xs = spans.map(([first, last]) => (first + last) / 2);
  const small = (title, unit, curve, factor) => curve && picture(title, { unit, make: () => ({ traces: lines(xs, curve, { name: title, shade: color(0), factor }), layout: { yaxis: { rangemode: "tozero" } } }) });
  return [small("Reply length: mean, shortest, longest", "tokens", lengths.reply_length, 1), small("Replies cut at the token limit", "%", lengths.truncated_share, 100)];
}
