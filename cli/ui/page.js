/* The page itself: which part is shown, and what follows the run while it grows. An address is `#run=NAME`,
   `#compare=A,B`, with `&attempt=ID` over it; without any, every run. A report has one run and no server. */

const head = document.querySelector("header.top"), nav = document.querySelector("nav"), foot = document.querySelector("footer");
const SECONDS = 5, MOST_SECONDS = 60, SHARE = 0.01;   // between looks; of the server's time that looking may take
const stale = note("");
let sections = [], follow = async () => {};   // of the route that is shown

const here = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const to = places => `#${new URLSearchParams(Object.entries(places).filter(([, value]) => value !== undefined && value !== null))}`;
const title = (brand, name, ...under) => head.replaceChildren(h("p", { class: "brand" }, inlined ? brand : h("a", { href: "#" }, brand)), h("h1", {}, visible(name)), ...under);

/* A section, its content made when it comes near the screen: `fill` gets it, and may fail on its own. */
function section(id, name, fill, { late = false } = {}) {
  const box = h("section", { id }, h("h2", {}, name));
  const load = async () => {
    const waiting = none("Reading …");
    box.append(waiting);
    try { const made = await fill(box); if (made) box.append(...[made].flat(9).filter(Boolean)); } catch (error) {
      const said = note(error.message);
      box.append(said);
      if (error.status === AWAY) setTimeout(() => { said.remove(); load(); }, 1000 * SECONDS);
    }
    waiting.remove();
    box.dataset.ready = "1";
  };
  if (late && !inlined) {
    const near = new IntersectionObserver(entries => { if (entries.some(entry => entry.isIntersecting)) { near.disconnect(); load(); } }, { rootMargin: "200px" });
    box.classList.add("late");
    near.observe(box);
  } else box.loading = load();
  return box;
}

function show(list) {
  sections = list;
  nav.replaceChildren(...list.map(box => h("a", { href: `#${box.id}`, onclick: event => { event.preventDefault(); box.scrollIntoView(); } }, box.querySelector("h2").textContent)));
  main.replaceChildren(...list);
  scrollTo(0, 0);
}

// ── every run ────────────────────────────────────────────────────────────────────────────────────────────────────────
const ENDS = { running: "training", failed: "crashed", vanished: "ended without a word" };
const stateOf = run => (run.damaged ? "damaged" : run.training ? "training" : run.paused ? "paused" : ENDS[run.outcome] ?? run.outcome);
const stateMark = run => h("span", { class: `state ${stateOf(run).split(" ")[0]}`, title: visible(run.reason ?? "") || null }, stateOf(run) + (stateOf(run) === "crashed" ? `: ${visible(run.reason)}` : ""));
const scoresOf = run => (run.before ? (run.before.version === run.after.version ? withError(run.after) : `${fixed(run.before.score)} → ${withError(run.after)}`) : "–");

async function showRuns() {
  const chosen = new Set();
  const compare = h("a", { class: "button", hidden: true }, "Compare");
  const search = h("input", { type: "search", placeholder: "Filter runs", "aria-label": "Filter runs", oninput: () => fill() });
  const box = h("div", { class: "scroll" });
  let found;
  function choose(name, on) {
    chosen[on ? "add" : "delete"](name);
    compare.hidden = chosen.size < 2;
    compare.href = to({ compare: [...chosen].join(",") });
    compare.textContent = `Compare ${chosen.size} runs`;
  }
  function fill() {
    const wanted = search.value.trim().toLowerCase();
    const rows = found.runs.filter(run => `${run.run} ${run.workflow ?? ""} ${run.model ?? ""}`.toLowerCase().includes(wanted)).map(run => {
      if (run.damaged) return h("tr", {}, h("td"), h("td", {}, h("b", {}, visible(run.run))), h("td", {}, h("span", { class: "state damaged" }, "damaged")), h("td", { colspan: 8, class: "why-damaged" }, visible(run.damaged)));
      const cells = [h("input", { type: "checkbox", checked: chosen.has(run.run), "aria-label": `Choose ${run.run}`, onchange: event => choose(run.run, event.target.checked) }),
        h("a", { href: to({ run: run.run }) }, visible(run.run)), stateMark(run), visible(run.workflow ?? "–"),
        run.target ? `${count(run.step)} / ${count(run.target)}` : count(run.step), scoresOf(run), run.champion ?? "–", count(run.trajectories), duration(run.worked_seconds), run.last_at ? ago(Date.now() / 1000 - run.last_at) : "–"];
      return h("tr", {}, cells.map((cell, i) => h("td", { class: i > 3 && i < 9 ? "right" : null }, cell)));
    });
    const heads = ["", "run", "", "workflow", "steps", "held-out score", "champion", "trajectories", "worked", "last entry"];
    box.replaceChildren(rows.length ? h("table", { class: "runs" }, h("thead", {}, h("tr", {}, heads.map((name, i) => h("th", { class: i > 3 && i < 9 ? "right" : null }, name)))), h("tbody", {}, rows))
      : none(found.runs.length ? "No run has such a name." : `No run in ${found.store} yet; \`millrace train examples/arithmetic.toml\` makes one.`));
  }
  let before, looks = 0;
  follow = async () => {
    found = await get(["runs"]);
    const now = JSON.stringify(found);
    if (now !== before || looks++ % 10 === 0) fill();   // `3 min ago` grows old, too
    before = now;
    title("Millrace", "Runs", dim(h("span", { class: "path" }, found.store)));
  };
  await follow();
  show([h("section", { id: "runs" }, h("h2", { hidden: true }, "Runs"), h("div", { class: "tools" }, search, compare), h("div", { class: "card" }, box))]);
  nav.replaceChildren();
}

// ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────
const tile = (label, value, small, style = "") => h("div", { class: `tile ${style}` }, h("span", {}, label), h("b", {}, value), h("small", {}, small));

function tiles(found) {
  const own = found.after, seconds = found.time.round;
  return h("div", { class: "tiles" },
    tile("held-out score", own ? `${fixed(found.before.score)} → ${fixed(own.score)}` : "–", own ? `policy ${found.before.version} → ${own.version}${isNumber(own.standard_error) ? `, standard error ${fixed(own.standard_error)}` : ""}, ${count(own.tasks)} tasks of split ${own.split}` : "not evaluated", "wide"),
    tile("optimizer steps", found.target ? `${count(found.step)} / ${count(found.target)}` : count(found.step), counted(found.sessions, "session")),
    tile("training trajectories", amount(found.trajectories), counted(found.shards, "shard")),
    tile("trained tokens", amount(found.trained_tokens), seconds ? `${count(found.trained_tokens / seconds)} per second of training rounds` : "no round yet"),
    tile("worked", duration(found.worked_seconds), "time between sessions left out"),
    tile("peak memory", `${(found.peak_memory_bytes / 2 ** 30).toFixed(2)} GiB`, "all processes"));
}

function law({ counters, terms, rescored }) {
  const there = terms.filter(([, value]) => value);
  return h("div", { class: "card" }, h("h3", {}, "Every prompt group is accounted for"),
    h("p", { class: "law" }, h("b", {}, count(counters.submitted)), " submitted = ", terms.map(([name, value], i) => [h("span", { class: value ? "" : "zero" }, h("b", {}, count(value)), ` ${name}`), i < terms.length - 1 ? " + " : ""])),
    counters.submitted ? [h("div", { class: "bar", "aria-hidden": "true" }, there.map(([name, value]) => h("i", { class: `o-${name}`, style: { "flex-grow": value }, "data-tip": `${name}: ${count(value)} groups` }))),
      h("p", { class: "legend" }, there.map(([name, value]) => h("span", {}, h("i", { class: `o-${name}` }), `${name} ${percent(value / counters.submitted)}`)))] : null,
    dim(`${counted(counters.quarantined, "shard")} quarantined`, rescored.length ? ` · scored again as ${visible(rescored.join(", "))}; this page shows the recorded rewards` : ""));
}

function lossesOf({ losses, failures, notes }) {
  return [notes.map(note), losses.length ? h("div", { class: "card" }, table(["why attempts and groups were lost", "count"], losses.map(([reason, value]) => [visible(reason), count(value)]), { right: [1] }),
    failures.map(({ number: times, id, error }) => h("details", {}, h("summary", {}, `${counted(times, "attempt")}: ${visible(error.split("\n").map(line => line.trim()).join(" ").slice(0, 200))}`), h("dl", { class: "talk" }, h("dt", {}, visible(id)), h("dd", { class: "failed" }, visible(error)))))) : null];
}

function timeTable({ time, step, worked_seconds: worked, evaluation_seconds: evaluations }) {
  const rows = time.phases.map(([name, seconds]) => [[h("i", { class: "swatch", style: { background: `var(--${name})` } }), name], duration(seconds), time.round ? percent(seconds / time.round) : "–"]);
  return [time.round ? dim(`${counted(step, "round")} took ${duration(time.round)} of ${duration(worked)} worked; evaluations took ${duration(evaluations)}; the rest is starting, making a base model, and MLflow.`,
    time.overlap ? ` Steps made by an older Millrace count phases that overlap, so they add up to ${percent(time.sum / time.round)} of the rounds.` : "") : null,
    h("div", { class: "card" }, table(["phase", "total", "of the rounds"], [...rows, ["rounds", duration(time.round), "100 %"]], { right: [1, 2], style: "phases" }))];
}

async function showRun(run) {
  const steps = new Steps(run);
  let refill = () => {};
  let [descriptions, overview] = await Promise.all([get(["metrics"]), get(["runs", run, "overview"]), steps.update()]), lanes, budget = h("div", { class: "side" });
  const lines = [{ name: run, steps, get shade() { return css("--accent"); }, get second() { return css("--second"); }, get scores() { return overview.scores; } }];
  const numbers = h("div", { class: "stack" });
  const facts = () => {
    const stale = inlined ? [] : [` · ${ago(Math.max(0, Date.now() / 1000 - overview.last_at))}`];
    title("Millrace run", run, dim(inlined ? null : [stateMark(overview), stale, " · "], `${date(overview.started_at)} · code ${visible(overview.code_version)} · `, h("span", { class: "path" }, visible(overview.place))));
    numbers.replaceChildren(tiles(overview), ...overview.notes.map(note), ...(overview.paused ? [note(`Paused: ${overview.paused}`)] : []), law(overview));
    budget.replaceChildren(...timeTable(overview).filter(Boolean));
  };
  facts();
  let reading;
  const contents = () => (reading ??= get(["runs", run, "contents"]));   // for two sections
  const parts = [
    section("overview", "Overview", async () => [numbers, progressPicture(lines)]),
    section("curves", "Curves", async box => {
      const spans = steps.width > 1 ? ` Each point is the mean of ${steps.width} steps, the band their lowest and highest.` : "";
      box.append(dim(`Drag over a picture to zoom, double-click to go back.${spans}`));
      refill = curvesOf(lines, descriptions, box);
      const environments = await get(["runs", run, "environments"]);
      return Object.keys(environments).length ? environmentsPicture(environments) : null;
    }),
    section("time", "Time", async () => {
      lanes = await get(["runs", run, "lanes"]);
      return [h("div", { class: "split" }, timePicture(steps, overview.phases), budget), lanesPicture(lanes)];
    }, { late: true }),
    section("staleness", "Staleness", async () => {
      const found = await contents(), { staleness: lag } = found;
      const sentence = lag.tokens ? ` Mean ${number(lag.mean)}, at most ${lag.max}; ${count(lag.over)} of ${count(lag.tokens)} tokens over the bound${lag.over && lag.policy === "mask" ? " and masked" : ""}; ${counted(lag.stale_groups, "group")} given up as stale.` : "";
      return [asOf(found), dim(`Lag of a token: the version of the policy being trained minus the version that sampled it. The run's bound is ${lag.bound}, kept by “${lag.policy}”.${sentence}`),
        h("div", { class: "split even" }, lagPicture(found), stalenessPicture(steps)), shardsPicture(found)];
    }, { late: true }),
    section("trajectories", "Trajectories", async box => {
      box.append(...[inlined ? dim("A report holds the groups below; ", code(`millrace ui ${run}`), " shows every attempt, with filters and search.") : attemptsOf(run)].flat());
      const found = await contents();
      return [lossesOf(found), h("div", { class: "grid" }, lengthPictures(found)), levelsPicture(found)];
    }, { late: true }),
    section("groups", "Groups", async () => { const found = await get(["runs", run, "groups"]); return [asOf(found), groupsOf(run, found)]; }, { late: true }),
    section("prompts", "Prompts", async () => { const found = await get(["runs", run, "prompts"]); return [asOf(found), promptsOf(found)]; }, { late: true }),
    section("lineage", "Lineage", async box => lineageOf(run, box), { late: true }),
    section("configuration", "Configuration", async () => settingsOf(await get(["runs", run, "settings"])), { late: true }),
  ];
  let names = Object.keys(steps.metrics).length, drawn = steps.spans.length;
  show(parts);
  follow = async () => {
    const now = await get(["runs", run, "overview"]), before = overview;
    if (now === before) return;
    overview = now;
    await steps.update();
    if (lanes) Object.assign(lanes, await get(["runs", run, "lanes"]));
    facts();
    if (Object.keys(steps.metrics).length !== names) { names = Object.keys(steps.metrics).length; refill(); }
    // Of a long run, a new point is a fraction of a pixel: the pictures wait until it can be seen.
    if (steps.spans.length - drawn < drawn / 400 && now.scores.length === before.scores.length && now.training) return;
    drawn = steps.spans.length;
    redraw();
  };
}

const asOf = found => (inlined ? null : dim(`As of step ${count(found.as_of_step)}; `, h("button", { type: "button", class: "link", onclick: () => { shown = null; route(); } }, "read again"), "."));

function settingsOf({ settings, sessions, num_sessions: all }) {
  return [h("details", { class: "card" }, h("summary", {}, `${counted(settings.length, "setting")}, frozen when the run began`), table([], settings.map(([name, value]) => [settingName(name), code(visible(value))]), { style: "settings" })),
    h("details", { class: "card" }, h("summary", {}, counted(all, "session") + (all > sessions.length ? `, the last ${sessions.length} shown` : "")),
      table(["session", "code", "digest of the reward"], sessions.map(one => [code(one.id), code(visible(one.code_version)), code(one.reward_sha256.slice(0, 12) || "–")]), { style: "settings" }))];
}

// ── lineage and promotion ────────────────────────────────────────────────────────────────────────────────────────────
async function lineageOf(run, box, version = "") {
  const found = await get(["runs", run, "lineage"], inlined || version === "" ? {} : { version });
  if (found.version === undefined) return none("No policy yet.");
  const panel = h("div", { class: "stack" });
  const again = async wanted => { try { panel.replaceWith(await lineageOf(run, box, wanted)); } catch (error) { panel.prepend(note(error.message)); } };
  const policy = (number, marks = [], style = "") => h("button", { type: "button", class: `node policy ${style}`, disabled: Boolean(inlined), onclick: () => again(number) }, h("b", {}, `policy ${number}`), marks.map(mark => h("small", {}, mark)));
  const marks = [...found.aliases, ...found.scores.map(score => `${score.split} ${withError(score)}`), ...(found.registry_version ? [`MLflow ${visible(found.registry_model)} ${found.registry_version}`] : []), ...(found.retired ? ["retired"] : [])];
  const columns = found.step ? [
    ["sampled by", found.sampled_by.map(number => policy(number))],
    ["shards", [...found.shards.map(use => h("div", { class: `node shard ${use.problem ? "broken" : ""}`, title: visible(use.problem), "data-of": use.sampled_by.join(" ") }, h("b", {}, visible(use.id)), h("small", {}, use.problem ? visible(use.problem) : `${counted(use.groups, "group")} trained`))),
      found.num_shards > found.shards.length ? none(`and ${count(found.num_shards - found.shards.length)} more`) : null]],
    ["step", [policy(found.step - 1, ["trained further"]), h("div", { class: "node step" }, h("b", {}, `step ${found.step}`), Object.entries(found.outcomes).filter(([, value]) => value).map(([name, value]) => h("small", {}, `${count(value)} ${name}`)))]],
    ["policy", [policy(found.version, marks, "marked")]]]
    : [["base", [policy(found.version, marks, "marked")]]];
  if (found.children.length) columns.push(["made from it", found.children.map(number => policy(number))]);
  const graph = h("div", { class: "graph" }, columns.map(([name, nodes]) => h("div", { class: "column" }, h("h4", {}, name), h("div", { class: "nodes" }, nodes))));
  const edges = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  graph.prepend(edges);
  new ResizeObserver(() => requestAnimationFrame(() => connect(graph, edges))).observe(graph);
  const choose = h("select", { "aria-label": "Policy version", onchange: event => again(event.target.value) }, [...new Set([...found.choices, found.version])].sort((a, b) => b - a).map(number => option(number, `policy ${number}`)));
  choose.value = found.version;
  panel.append(h("div", { class: "tools" }, inlined ? `policy ${found.version}` : choose, inlined ? null : promotion(run, found, again)), h("div", { class: "card scroll" }, graph),
    h("div", { class: "card" }, table([], [["weights", code(visible(found.weights))], ["digest", code(found.weights_sha256)], ["code", code(visible(found.code_version || "–"))], ["configuration", code(found.config_sha256)], ...(found.dataset_digest ? [["data set", code(found.dataset_digest)]] : [])], { style: "settings" })));
  return panel;
}

/* Lines between the nodes of neighbouring columns; a shard only to the policies that sampled it. */
function connect(graph, edges) {
  const frame = graph.getBoundingClientRect(), columns = [...graph.querySelectorAll(".column")].map(column => [...column.querySelectorAll(".node")]);
  edges.setAttribute("width", graph.scrollWidth);
  edges.setAttribute("height", graph.scrollHeight);
  const isTall = getComputedStyle(graph).flexDirection === "column";   // on a narrow screen, columns are below each other
  const side = (node, after) => {
    const box = node.getBoundingClientRect();
    return isTall ? [box.left + Math.min(40, box.width / 2) - frame.left, (after ? box.bottom : box.top) - frame.top] : [(after ? box.right : box.left) - frame.left, box.top + box.height / 2 - frame.top];
  };
  const paths = columns.slice(1).flatMap((column, i) => column.flatMap(node => columns[i].filter(before =>
    node.dataset.of === undefined || node.dataset.of.split(" ").some(version => before.textContent === `policy ${version}`)).filter(before => i !== 1 || node.classList.contains("step") || !before.classList.contains("shard")).map(before => {
    const [x, y] = side(before, true), [u, v] = side(node, false);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", isTall ? `M${x},${y} C${x},${(y + v) / 2} ${u},${(y + v) / 2} ${u},${v}` : `M${x},${y} C${(x + u) / 2},${y} ${(x + u) / 2},${v} ${u},${v}`);
    return path;
  })));
  edges.replaceChildren(...paths);
}

function promotion(run, found, again) {
  const said = h("output");
  if (found.champion === found.version) return [h("span", { class: "state finished" }, "this is the champion"), said];
  if (found.problems.length) return h("details", {}, h("summary", {}, `not to be promoted: ${counted(found.problems.length, "reason")}`), h("ul", {}, found.problems.map(problem => h("li", {}, visible(problem)))));
  const button = h("button", { type: "button", class: "button", onclick: async () => {
    if (!confirm(`Make policy ${found.version} of run ${run} the champion${found.champion === null ? "" : ` in place of policy ${found.champion}`}?`)) return;
    button.disabled = true;
    try { const done = await post(["runs", run, "promote"], { version: found.version }); await again(found.version); document.querySelector("#lineage output")?.append(`MLflow: ${done.mlflow}`); } catch (error) { said.textContent = error.message; button.disabled = false; }
  } }, "Promote to champion");
  return [button, h("small", {}, ` passes the gate: gap at most ${number(found.max_gap)}, no shard in quarantine`), said];
}

// ── several runs ─────────────────────────────────────────────────────────────────────────────────────────────────────
async function showComparison(names) {
  const descriptions = await get(["metrics"]);
  const runs = await Promise.all(names.map(async (name, i) => {
    const run = { name, steps: new Steps(name), swatch: `var(--s${i % 8})`, get shade() { return color(i); }, get second() { return color(i); } };
    const [overview, settings] = await Promise.all([get(["runs", name, "overview"]), get(["runs", name, "settings"]), run.steps.update()]);
    return Object.assign(run, { overview, scores: overview.scores, settings: Object.fromEntries(settings.settings) });
  }));
  title("Millrace", "Comparison", h("p", { class: "legend" }, runs.map(run => h("span", {}, h("i", { style: { background: run.swatch } }), h("a", { href: to({ run: run.name }) }, visible(run.name))))));
  const keys = [...new Set(runs.flatMap(run => Object.keys(run.settings)))].filter(name => name !== "run" && new Set(runs.map(run => run.settings[name])).size > 1);
  const results = ["steps", "held-out score", "trajectories", "trained tokens", "worked"];
  const facts = [run => count(run.overview.step), run => scoresOf(run.overview), run => count(run.overview.trajectories), run => amount(run.overview.trained_tokens), run => duration(run.overview.worked_seconds)];
  const heads = runs.map(run => [h("i", { class: "swatch", style: { background: run.swatch } }), visible(run.name)]);
  show([
    section("settings", "What differs", async () => h("div", { class: "card scroll" }, table(["", ...heads], [...results.map((name, i) => [name, ...runs.map(facts[i])]), ...keys.map(name => [settingName(name), ...runs.map(run => code(visible(run.settings[name] ?? "–")))])], { style: "compared" }),
      keys.length ? null : none("Their settings are the same."))),
    section("progress", "Progress", async () => progressPicture(runs)),
    section("curves", "Curves", async box => { curvesOf(runs, descriptions, box); }),
  ]);
  follow = async () => {
    const changed = await Promise.all(runs.map(async run => {
      const now = await get(["runs", run.name, "overview"]);
      if (now === run.overview) return false;
      Object.assign(run, { overview: now, scores: now.scores });
      return run.steps.update();
    }));
    if (changed.some(Boolean)) redraw();
  };
}

// ── routes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
let shown = null;

async function route() {
  const { run = inlined?.run, compare, attempt, token } = here();
  if (token) {
    history.replaceState(null, "", to({ run }));
    await post(["login"], { token }).catch(() => {});
  }
  const place = compare ? `compare ${compare}` : run ? `run ${run}` : "runs";
  document.querySelector("dialog")?.close();
  try {
    if (place !== shown) {
      shown = place;
      document.title = `${compare ?? run ?? "Runs"} · Millrace`;
      await (compare ? showComparison(compare.split(",")) : run ? showRun(run) : showRuns());
    }
    if (attempt && !inlined) await openAttempt(run, attempt);
  } catch (error) {
    follow = error.status === AWAY ? route : async () => {};
    shown = null;
    if (error.status === 401) return askForToken();
    title("Millrace", run ?? "Runs");
    nav.replaceChildren();
    main.replaceChildren(note(error.message));
  }
}

function askForToken() {
  title("Millrace", "Token");
  const field = h("input", { type: "password", autocomplete: "current-password", "aria-label": "Token", autofocus: true }), said = h("output");
  main.replaceChildren(h("section", {}, h("form", { class: "card tools", onsubmit: async event => {
    event.preventDefault();
    try { await post(["login"], { token: field.value }); await route(); } catch (error) { said.textContent = error.message; }
  } }, dim("This server wants the token that ", code("millrace ui"), " printed when it began."), field, h("button", {}, "Open"), said)));
}

addEventListener("hashchange", route);
if (inlined) foot.replaceChildren(`Made ${date(inlined.made_at)} by `, code(`millrace report ${inlined.run}`), " from the run's log and shards.");
else (async function look() {
  const before = waited;
  if (!document.hidden) await follow().then(() => stale.remove(), error => {   // what is away is asked again
    stale.replaceChildren(visible(`What is shown may be old: ${error.message}`));
    main.prepend(stale);
  });
  setTimeout(look, Math.min(Math.max(1000 * SECONDS, (waited - before) / SHARE), 1000 * MOST_SECONDS));
})();
route();
