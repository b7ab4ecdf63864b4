/* Attempts: one as a conversation with coloured tokens, the groups worth reading, filters and search, prompts over time. */

const scaled = (value, [low, high]) => (isNumber(value) ? (high > low ? (100 * (value - low)) / (high - low) : 50) : 50);
const score = (reward, rewards) => h("span", { class: "score", style: { "--p": scaled(reward, rewards).toFixed(1) } }, number(reward));
const versionsOf = row => (row.head_version === row.tail_version ? `policy ${row.head_version}` : `policy ${row.head_version}–${row.tail_version}`);
const outcomeOf = row => (row.is_eval || row.outcome === "eval" ? "held-out" : `${row.outcome ?? "lost"}${row.step ? ` in step ${row.step}` : ""}`);
const styled = (text, style) => h("span", { class: style && style !== "none" ? style.split(" ").map(word => `t-${word}`).join(" ") : null }, text);
const legend = pieces => pieces.map(([text, style]) => { const piece = styled(text === "■" ? "" : text, style); if (text === "■") piece.classList.add("swatch"); return piece; });

/* The tokens of a turn; each says its value, probability, logprob and the policy version that sampled it. */
function tokens(turn) {
  const gap = turn.left_out ? Math.floor((turn.texts.length * 3) / 4) - 1 : -1;
  return h("span", { class: "tokens" }, turn.texts.map((text, i) => {
    const token = styled(visible(text), turn.styles[i]);
    const value = turn.values[i] && !turn.values[i].includes("@") ? `${turn.values[i]}, ` : "";
    token.dataset.tip = `${value}p ${number(Math.exp(turn.logprobs[i]))}, logprob ${fixed(turn.logprobs[i])}, policy ${turn.versions[i]}`;
    return i === gap ? [token, h("span", { class: "gap" }, ` … ${counted(turn.left_out, "token")} left out … `)] : token;
  }));
}

/* One training sequence: what was said, the tools that were called, and the other attempts of its group. */
function conversation(run, row, rewards) {
  const talk = h("dl", { class: "talk" });
  const say = (who, what, style = "") => talk.append(h("dt", {}, visible(who)), h("dd", { class: style }, what));
  row.messages.forEach((message, i) => {
    say(message.role, message.tokens ? tokens(message.tokens) : visible(message.content), message.is_completion ? "said" : "");
    if (row.left_out && i === Math.floor((row.messages.length * 3) / 4) - 1) say("", `… ${counted(row.left_out, "message")} left out …`, "gap");
  });
  row.turns.forEach((turn, i) => say(`turn ${i + 1}`, tokens(turn), "said"));
  for (const call of row.calls) say(call.name, visible(`${call.arguments} → ${call.result}`), call.failed ? "failed" : "");
  const facts = [outcomeOf(row), versionsOf(row), `p ${number(row.p)}`, row.status, `${count(row.sampled)} tokens`,
    ...row.reward_parts.map(([name, value]) => `${visible(name)} ${number(value)}`), ...(row.rejected ? [`rejected: ${visible(row.rejected)}`] : []), ...(row.sequence ? [`sequence ${row.sequence}`] : [])];
  const others = row.attempts.map(other => [h("a", { href: to({ run, attempt: `${row.id.slice(0, row.id.lastIndexOf("/"))}/${other.attempt}` }) }, String(other.attempt)), number(other.reward), other.status, visible(other.reply)]);
  return h("article", { class: "card group" },
    h("header", {}, score(row.reward, rewards), h("div", {}, h("code", { class: "id" }, visible(row.id)), h("p", { class: "dim" }, facts.join(" · ")))),
    talk,
    h("details", {}, h("summary", {}, `${counted(row.num_attempts, "attempt")}, mean reward ${number(row.mean_reward)}`),
      h("div", { class: "scroll" }, table(["attempt", "reward", "status", "reply"], others, { right: [0, 1], style: "attempts" })),
      row.num_attempts > others.length ? dim(`${counted(row.num_attempts - others.length, "more attempt")} not shown.`) : null,
      dim("shard ", code(visible(row.shard)))));
}

function groupsOf(run, { lists, rewards }) {
  const first = lists.flatMap(list => list.groups)[0];
  return [dim("A group is every attempt at one prompt. Each card shows one attempt: ", code(`millrace traj show ${run} ID`), " prints it in full. p is the geometric mean of the probabilities the policy gave the attempt's tokens."),
    first ? dim("Tokens by log-probability: ", legend(first.legend)) : null,
    ...lists.flatMap(list => [h("h3", { id: `groups-${list.key}` }, list.title, h("small", {}, ` ${list.definition}`)),
      h("div", { class: "grid cards" }, list.groups.length ? list.groups.map(row => conversation(run, row, rewards)) : none("No training group qualifies."))])];
}

// ── one attempt, opened ──────────────────────────────────────────────────────────────────────────────────────────────
async function openAttempt(run, id) {
  const dialog = h("dialog", { class: "attempt", onclose: () => { dialog.remove(); if (here().attempt === id) history.replaceState(null, "", to({ run })); } });
  const body = h("div", {}, none("Reading the shard …"));
  const choose = h("select", { "aria-label": "Colour of the tokens", onchange: () => show(choose.value) }, ["logprob", "advantage", "version", "gap"].map(name => option(name)));
  dialog.append(h("div", { class: "tools" }, h("label", {}, "colour by ", choose), h("button", { type: "button", class: "close", onclick: () => dialog.close() }, "Close")), body);
  document.body.append(dialog);
  dialog.showModal();
  async function show(by) {
    try {
      const found = await get(["runs", run, "trajectory"], { id, color: by });
      body.replaceChildren(...(found.error ? [h("h3", {}, code(visible(id)), ` ${found.status}, no reward`), h("pre", { class: "failed" }, visible(found.error))] : []),
        ...found.sequences.flatMap(row => [dim(legend(row.legend)), conversation(run, row, [Math.min(0, row.reward ?? 0), Math.max(1, row.reward ?? 1)])]));
    } catch (error) { body.replaceChildren(note(error.message)); }
  }
  await show("logprob");
}

// ── every attempt: filters and search ────────────────────────────────────────────────────────────────────────────────
const FILTERS = [["words", "Search the text", "search"], ["step", "step: 12 or 3..7"], ["reward", "reward: <0.5"], ["length", "tokens: >100"], ["environment", "environment"]];

function attemptsOf(run) {
  const fields = Object.fromEntries(FILTERS.map(([name, hint, type = "text"]) => [name, h("input", { type, name, placeholder: hint, "aria-label": hint, class: type === "search" ? "wide" : "narrow" })]));
  fields.status = h("select", { "aria-label": "status" }, option("", "any status"), ["ok", "truncated", "max_turns", "failed"].map(name => option(name)));
  fields.held_out = h("select", { "aria-label": "Training or held-out" }, option("", "training"), option("1", "and held-out"));
  const rows = h("tbody"), state = h("output"), more = h("button", { type: "button", hidden: true, onclick: () => look(more.value) }, "Go on");
  const index = h("button", { type: "button", hidden: true, onclick: makeIndex }, "Make the search index");
  const form = h("form", { class: "tools", onsubmit: event => { event.preventDefault(); look(""); } }, Object.values(fields), h("button", {}, "Show"));
  const heads = ["id", "reward", "status", "tokens", "policy", "outcome", "prompt", "reply"];

  async function look(after) {
    state.textContent = "reading …";
    const asked = Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value.trim()]));
    try {
      const found = await get(["runs", run, "trajectories"], { ...asked, after });
      if (!after) rows.replaceChildren();
      rows.append(...found.rows.map(line));
      more.hidden = !found.next;
      more.value = found.next ?? "";
      const left = Object.entries(found.left_out).map(([shard, why]) => `shard ${shard} is left out: ${why}`);
      state.textContent = [counted(rows.childElementCount, "attempt"), found.next ? `${count(found.looked)} of ${count(found.shards)} shards are looked into` : "", ...left.slice(0, 3)].filter(Boolean).join("; ");
      const { behind } = asked.words ? await get(["runs", run, "index"]) : { behind: 0 };
      index.hidden = !behind;
      index.textContent = `Add ${counted(behind, "shard")} to the index`;
    } catch (error) {
      state.textContent = error.message;
      index.hidden = !(asked.words && error.status === 404);
      index.textContent = "Make the search index";
    }
  }

  async function makeIndex() {
    index.hidden = true;
    state.textContent = "indexing every shard …";
    try { await post(["runs", run, "index"], {}); await look(""); } catch (error) { state.textContent = error.message; }
  }

  function line(row) {
    const link = h("a", { href: to({ run, attempt: row.id }) }, visible(row.id));
    const cells = row.failed ? [link, "–", row.status, "", "", "", "", visible(row.reply)]
      : [link, number(row.reward), row.status, count(row.num_sampled ?? 0), versionsOf(row).slice(7), outcomeOf(row), visible(row.prompt), visible(row.reply)];
    return h("tr", {}, cells.map((cell, i) => h("td", { class: i === 1 || i === 3 || i === 4 ? "right" : i > 5 ? "text" : i === 0 ? "id" : null }, cell)));
  }

  look("");
  return [form, h("p", {}, state, " ", index), h("div", { class: "scroll" }, h("table", { class: "rows" }, h("thead", {}, h("tr", {}, heads.map((head, i) => h("th", { class: i === 1 || i === 3 || i === 4 ? "right" : null }, head)))), rows)), more];
}

// ── prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────
const PAGE = 40;
const KINDS = { never: "never above the lowest", always: "always at the highest", rose: "rose", fell: "fell", same: "same at first and last" };

function promptsOf({ histories, rewards }) {
  const squares = [0, 25, 50, 75, 100].map(p => h("i", { style: { "--p": p } }));
  return [dim("How each prompt fared every time it was seen: mean reward of its attempts, from ", h("span", { class: "scale" }, number(rewards[0]), " ", squares, " ", number(rewards[1])), "; × where every attempt failed."),
    ...histories.map(history => promptHistory(history, rewards))];
}

function promptHistory({ name, unit, prompts, repeated, shown, kinds, columns, rows }, rewards) {
  const card = h("div", { class: "card history", "data-history": name }, h("h3", {}, `${name[0].toUpperCase()}${name.slice(1)} prompts`, h("small", {}, ` by ${unit}`)));
  if (!repeated) { card.append(none(prompts ? `${count(prompts)} prompts, each seen once so far.` : "None yet.")); return card; }
  const search = h("input", { type: "search", placeholder: "Search id or text", "aria-label": `Search ${name} prompts`, oninput: again });
  const kind = h("select", { "aria-label": `Which ${name} prompts`, onchange: again }, option("", "all"), Object.entries(KINDS).map(([value, label]) => option(value, label)));
  const said = h("output"), grid = h("table", { class: columns.length <= 12 ? "few" : "" }), more = h("button", { type: "button", onclick: () => { limit += 5 * PAGE; fill(); } }, "Show more");
  let sorted = { key: "mean", up: true }, limit = PAGE;
  function again() { limit = PAGE; fill(); }

  function compare(a, b) {
    const [x, y] = [a[sorted.key], b[sorted.key]];
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return sorted.up ? order : -order;
  }

  function cell(value, i, id) {
    if (value === null) return h("td", { class: "c" });
    const failed = value === "x";
    return h("td", { class: "c" }, h("div", { class: failed ? "cell" : "cell scored", style: { "--p": failed ? 0 : scaled(value, rewards) },
      "data-tip": `${visible(id)}\n${unit} ${columns[i]}: ${failed ? "every attempt failed" : `reward ${number(value)}`}` }, failed ? "×" : columns.length <= 12 ? number(Number(value.toFixed(2))) : ""));
  }

  function fill() {
    const wanted = search.value.trim().toLowerCase();
    const found = rows.filter(row => (!kind.value || row.kind === kind.value) && (!wanted || `${row.id} ${row.text}`.toLowerCase().includes(wanted))).sort(compare);
    const heads = [["prompt", "id", ""], ["mean", "mean", "right"], ["change", "change", "right change"]].map(([label, key, style]) =>
      h("th", { class: style, "aria-sort": sorted.key === key ? (sorted.up ? "ascending" : "descending") : null }, h("button", { type: "button",
        onclick: () => { sorted = { key, up: sorted.key === key ? !sorted.up : true }; fill(); } }, label + (sorted.key === key ? (sorted.up ? " ▲" : " ▼") : ""))));
    const sparse = i => columns.length > 12 && i % Math.ceil(columns.length / 10) !== 0;
    grid.replaceChildren(h("thead", {}, h("tr", {}, heads, columns.map((label, i) => h("th", { class: "c", "data-tip": `${unit} ${label}` }, sparse(i) ? "" : label)))),
      h("tbody", {}, found.slice(0, limit).map(row => h("tr", {},
        h("td", { class: "prompt", title: visible(`${row.id}  ${row.text}`) }, code(visible(row.id)), h("span", {}, visible(row.text))),
        h("td", { class: "number" }, fixed(row.mean, 2)), h("td", { class: "number change" }, (row.change > 0 ? "+" : "") + fixed(row.change, 2)),
        row.cells.map((value, i) => cell(value, i, row.id))))));
    said.textContent = `${count(Math.min(limit, found.length))} of ${count(found.length)} shown`;
    more.hidden = found.length <= limit;
  }
  fill();
  card.append(h("p", {}, `${count(prompts)} prompts, ${count(repeated)} seen more than once: `, h("b", {}, count(kinds.never)), " never above the lowest reward, ", h("b", {}, count(kinds.always)), " always at the highest, ",
    h("b", {}, count(kinds.rose)), " rose, ", h("b", {}, count(kinds.fell)), " fell.", shown < repeated ? ` Shown are the ${count(shown)} whose reward changed most; the other ${count(repeated - shown)} are left out.` : ""),
    h("div", { class: "tools" }, search, kind, said), h("div", { class: "scroll" }, grid), more);
  return card;
}
