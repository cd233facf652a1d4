// The page at / of `headwater serve`: asks /watch.json every two seconds and draws what it says. Everything that is
// shown is set as text, never as HTML. No data comes from anywhere else.
"use strict";

const EVERY_MS = 2000;
const SPANS_S = [60, 120, 300, 600]; // of the charts: the shortest that shows all there is
const MAX_POINTS = 450;
const MAX_ENTRIES = 60;
const KEY = "headwater-key";

const $ = (id) => document.getElementById(id);
const state = { key: sessionStorage.getItem(KEY), session: "", points: [], entries: [], look: null, sort: "num_bytes", clock: 0, span: 60, asked: false };

// ---- numbers with units ---------------------------------------------------------------------------------------------
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return [unit === 0 ? String(Math.round(value)) : value >= 100 ? value.toFixed(0) : value.toFixed(1), UNITS[unit]];
}
const size = (value) => bytes(value).join(" ");
const number = (value) => Math.round(value).toLocaleString("en");
const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
function percent(value) {
  if (value === null || value === undefined) return "–";
  const shown = 100 * value;
  return `${shown > 0 && shown < 10 ? shown.toFixed(1) : shown.toFixed(0)} %`;
}
function ago(seconds) {
  if (seconds < 1.5) return "now";
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit} ago`;
  }
  return `${Math.floor(seconds)} s ago`;
}
const clock = (time_s) => new Date(time_s * 1000).toLocaleTimeString([], { hour12: false });

// ---- making elements ------------------------------------------------------------------------------------------------
function fill(element, children) {
  for (const child of children) if (child !== null && child !== undefined) element.append(child);
  return element;
}
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== false) element.setAttribute(name, value);
  return fill(element, children);
}
function draw(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}
function big(id, value, unit = "") {
  $(id).replaceChildren(value, unit ? make("small", {}, unit) : "");
}

// ---- charts ---------------------------------------------------------------------------------------------------------
function niceTop(value) {
  if (value <= 0) return 1024 ** 2;
  const base = 1024 ** Math.max(0, Math.floor(Math.log(value) / Math.log(1024)));
  const steps = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  return base * (steps.find((step) => step * base >= value) ?? 1024);
}
// lines: {points: [[time, value|null]], style, wash, label}. `step` joins over nulls: a rate stands until the next one.
function chart(svg, { lines, sticks = [], top, format, label, empty }) {
  const width = Math.max(svg.clientWidth, 200), height = 150, left = 62, right = 6, above = 8, below = 20;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", label);
  const now = state.clock, x = (t) => left + (width - left - right) * (1 - (now - t) / state.span);
  const y = (v) => above + (height - above - below) * (1 - Math.min(v / top, 1));
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const at = y(top * share);
    parts.push(draw("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }));
    parts.push(draw("text", { x: left - 8, y: at + 4, "text-anchor": "end" }, format(top * share)));
  }
  for (const [share, anchor] of [[1, "start"], [0.5, "middle"], [0, "end"]]) {
    const seconds = state.span * share, text = seconds < 60 ? `−${seconds} s` : `−${seconds / 60} min`;
    parts.push(draw("text", { x: x(now - seconds), y: height - 4, "text-anchor": anchor }, seconds ? text : "now"));
  }
  let seen = 0;
  for (const [t, v, most] of sticks) {
    if (v <= 0 || now - t > state.span) continue;
    seen += 1;
    const tall = 6 + 24 * Math.min(v / Math.max(most, 1e-9), 1);
    parts.push(draw("line", { class: "stick", x1: x(t), x2: x(t), y1: height - below, y2: height - below - tall }));
  }
  for (const { points, style, wash } of lines) {
    const shown = points.filter(([t, v]) => v !== null && now - t <= state.span);
    if (!shown.length) continue;
    seen += 1;
    const path = shown.map(([t, v], i) => `${i ? "L" : "M"}${x(t).toFixed(1)} ${y(v).toFixed(1)}`).join("");
    const last = shown[shown.length - 1];
    if (wash) parts.push(draw("path", { class: `wash ${style}`, d: `${path}L${x(last[0]).toFixed(1)} ${y(0)}L${x(shown[0][0]).toFixed(1)} ${y(0)}Z` }));
    parts.push(draw("path", { class: `line ${style}`, d: path }));
    if (shown.length < 3 && !wash) parts.push(draw("circle", { class: `dot ${style}`, cx: x(last[0]), cy: y(last[1]), r: 3 }));
  }
  if (!seen && empty) parts.push(draw("text", { class: "empty", x: (left + width) / 2, y: height / 2 - 4 }, empty));
  svg.replaceChildren(...parts);
}
function legend(id, entries) {
  $(id).replaceChildren(...entries.map(([style, text]) => make("li", {}, make("i", { class: style }), text)));
}
function drawCharts() {
  const points = state.points, last = points[points.length - 1];
  if (!last) return;
  state.span = SPANS_S.find((span) => span >= last.time_s - points[0].time_s) ?? SPANS_S[SPANS_S.length - 1];
  const tiers = Object.keys(last.tiers);
  const rates = [{ points: points.map((p) => [p.time_s, p.hit_rate]), style: "all" }];
  tiers.slice(0, 4).forEach((tier, i) => rates.push({ points: points.map((p) => [p.time_s, p.tier_rates[tier] ?? null]), style: `t${i + 1}` }));
  legend("rate-legend", [["all", "tokens asked for"], ...tiers.slice(0, 4).map((tier, i) => [`t${i + 1}`, tier])]);
  state.asked ||= points.some((point) => point.hit_rate !== null);
  chart($("rate-chart"), { lines: rates, top: 1, format: percent, empty: state.asked ? "No request lately" : "No request since this page was opened",
    label: `Hit rate of the last minutes; now ${percent(last.hit_rate)}` });
  const out = points.map((p) => [p.time_s, p.out_bytes_s]), into = points.map((p) => [p.time_s, p.in_bytes_s]);
  const most = Math.max(...out.concat(into).filter(([t]) => state.clock - t <= state.span).map(([, v]) => v), 0);
  legend("bytes-legend", [["load", "loaded"], ["save", "saved"]]);
  const moved = most > 0 ? [{ points: into, style: "save", wash: true }, { points: out, style: "load", wash: true }] : [];
  chart($("bytes-chart"), { lines: moved, top: niceTop(most), format: (v) => `${size(v).replace(".0 ", " ")}/s`, empty: "No bytes have moved lately",
    label: `Bytes loaded and saved a second; now ${size(last.out_bytes_s)} and ${size(last.in_bytes_s)}` });
  legend("fill-legend", [["load", "used"], ["evict", "evictions"]]);
  const evicting = Math.max(...points.map((p) => p.evicted_s), 0);
  chart($("fill-chart"), { lines: [{ points: points.map((p) => [p.time_s, p.data_bytes ? p.used_bytes / p.data_bytes : null]), style: "load", wash: true }],
    sticks: points.map((p) => [p.time_s, p.evicted_s, evicting]), top: 1, format: percent,
    label: `Fill of the last minutes; now ${percent(last.data_bytes ? last.used_bytes / last.data_bytes : 0)}` });
}

// ---- figures --------------------------------------------------------------------------------------------------------
function drawTiles(look) {
  const { store, totals } = look, last = state.points[state.points.length - 1];
  const share = store.data_bytes ? store.used_bytes / store.data_bytes : 0;
  const [filled, percentSign] = percent(share).split(" ");
  big("fill", filled, percentSign);
  const bar = $("fillbar"), done = Math.max(store.used_bytes - store.pending_bytes, 0) / Math.max(store.data_bytes, 1);
  bar.children[0].style.width = `${100 * done}%`;
  bar.children[1].style.width = `${(100 * store.pending_bytes) / Math.max(store.data_bytes, 1)}%`;
  bar.setAttribute("aria-label", `${percent(share)} used`);
  $("fillnote").textContent = `${size(store.used_bytes)} of ${size(store.data_bytes)}, ${count(store.chunks, "chunk")}`;
  const ever = totals.asked_tokens ? totals.matched_tokens / totals.asked_tokens : null;
  const [rate, sign = ""] = percent(last?.hit_rate ?? ever).split(" ");
  big("rate", rate, sign);
  $("ratenote").textContent = totals.asked_tokens
    ? `${number(totals.matched_tokens)} of ${number(totals.asked_tokens)} tokens since start${totals.loaded_tokens === totals.matched_tokens ? "" : `, ${number(totals.loaded_tokens)} loaded`}` : "no request yet";
  for (const [id, name, total, things] of [["out", "out_bytes_s", totals.loaded_bytes, count(totals.loads, "load")], ["in", "in_bytes_s", totals.saved_bytes, count(totals.saves, "save")]]) {
    const [value, unit] = bytes(last ? last[name] : 0);
    big(id, value, `${unit}/s`);
    $(`${id}note`).textContent = `${size(total)} in ${things}`;
  }
  big("evicted", number(store.evicted), store.evicted === 1 ? "chunk" : "chunks");
  const wrong = [[store.damaged, "damaged"], [totals.dropped_chunks, "dropped"], [totals.failed_loads, "failed loads"], [totals.late_fetches, "late fetches"]];
  $("evictednote").textContent = wrong.filter(([n]) => n > 0).map(([n, what]) => `${number(n)} ${what}`).join(", ") || "nothing damaged or dropped";
  const engines = look.processes.filter((process) => process.role.includes("scheduler")).length;
  big("attached", number(engines || look.processes.length), (engines || look.processes.length) === 1 ? "server" : "servers");
  const open = look.tiers.filter((tier) => tier.is_breaker_open);
  $("attachednote").textContent = open.length ? `breaker open: ${open.map((tier) => tier.name).join(", ")}` : `${count(store.members, "process")} with the pool open`;
  $("attachednote").classList.toggle("bad", open.length > 0);
}

// ---- tables ---------------------------------------------------------------------------------------------------------
// columns: [title, cell(row) -> text or node, numeric, sort name]
function table(id, columns, rows, none) {
  const head = make("tr");
  for (const [title, , numeric, sort] of columns) {
    const cell = make("th", { scope: "col", class: numeric ? "n" : "", "aria-sort": sort && sort === state.sort ? "descending" : false });
    if (sort) {
      const button = make("button", { type: "button" }, title);
      button.addEventListener("click", () => { state.sort = sort; drawPrefixes(state.look); });
      cell.append(button);
    } else cell.append(title);
    head.append(cell);
  }
  const body = make("tbody");
  for (const row of rows) {
    const line = make("tr");
    for (const [title, cell, numeric] of columns) {
      const value = cell(row);
      const kind = title === "Prefix" ? "key" : numeric ? "n" : "text";
      line.append(fill(make("td", { class: kind, title: kind === "text" && typeof value === "string" ? value : false }), [value]));
    }
    body.append(line);
  }
  if (!rows.length) body.append(make("tr", {}, make("td", { class: "none", colspan: columns.length }, none)));
  const focused = document.activeElement?.closest?.(`#${id}`) ? document.activeElement.textContent : null;
  $(id).replaceChildren(make("thead", {}, head), body);
  if (focused) for (const button of $(id).querySelectorAll("button")) if (button.textContent === focused) button.focus();
}
function bar(value, most) {
  const element = make("i", { class: "size", "aria-hidden": "true" });
  element.style.width = `${Math.round((70 * value) / Math.max(most, 1))}px`;
  const cell = document.createDocumentFragment();
  cell.append(element, size(value));
  return cell;
}
const owner = (rows, name) => rows.some((row) => row[name]);
function drawPrefixes(look) {
  const rows = [...look.prefixes].sort((a, b) => b[state.sort] - a[state.sort]).slice(0, 12);
  const most = Math.max(...rows.map((row) => row.num_bytes), 0), now = look.time_s;
  const columns = [
    ["Prefix", (r) => r.key],
    ["Tokens", (r) => (r.first_token ? `${number(r.first_token)} – ${number(r.num_tokens)}` : number(r.num_tokens)), true],
    ["Size", (r) => bar(r.num_bytes, most), true, "num_bytes"],
    ["Hits", (r) => number(r.hits), true, "hits"],
    ["Last used", (r) => ago(now - r.last_used_s), true, "last_used_s"],
    ["Forks", (r) => (r.branches ? number(r.branches) : "–"), true],
    ["Model", (r) => r.model || "–"]];
  if (owner(rows, "tenant")) columns.push(["Tenant", (r) => r.tenant || "–"]);
  table("prefixes", columns, rows, "Nothing is stored yet. The first prompt of a whole chunk or more will show up here.");
}
function drawTables(look) {
  drawPrefixes(look);
  const now = look.time_s;
  table("processes", [["Engine", (r) => r.engine], ["Role", (r) => r.role],
    ["Loaded", (r) => size(r.loaded_bytes), true], ["Saved", (r) => size(r.saved_bytes), true],
    ["Hit rate", (r) => percent(r.asked_tokens ? r.matched_tokens / r.asked_tokens : null), true], ["Running for", (r) => ago(now - r.started_s).replace(" ago", "").replace("now", "0 s"), true],
    ["Pid", (r) => String(r.pid), true], ["Model", (r) => r.model || "–"]],
  look.processes, look.pool.state === "private" ? "This pool is private memory of this server's engine." : "No engine publishes figures for this pool.");
  const columns = [["Model", (r) => r.model || "–"]];
  if (owner(look.holders, "tenant")) columns.push(["Tenant", (r) => r.tenant || "–"]);
  columns.push(["Tokens", (r) => number(r.num_tokens), true], ["Size", (r) => size(r.num_bytes), true], ["Hits", (r) => number(r.hits), true]);
  table("holders", columns, look.holders, "Nothing is stored yet.");
  $("tiers-card").hidden = !look.tiers.length;
  table("tiers", [["Tier", (r) => r.name], ["State", (r) => make("span", { class: r.is_breaker_open ? "badge bad" : "badge" }, r.is_breaker_open ? "breaker open" : "in use")],
    ["Hits", (r) => number(r.hits), true], ["Misses", (r) => number(r.misses), true], ["Read", (r) => size(r.hit_bytes), true], ["Fetched", (r) => count(r.fetched, "chunk"), true],
    ["Copied", (r) => size(r.stored_bytes), true], ["Waiting", (r) => number(r.waiting), true], ["Failed", (r) => number(r.failed), true], ["Trips", (r) => number(r.breaker_trips), true]], look.tiers, "");
}

// ---- activity -------------------------------------------------------------------------------------------------------
const WORDS = { saved: "save", copied: "copy", hit: "hit", removed: "remove", cleared: "clear", lost: "gap", attached: "join", left: "leave", breaker: "breaker" };
function sentence(e) {
  const who = [e.model, e.tenant && `tenant ${e.tenant.slice(0, 8)}`].filter(Boolean).join(", "), of = who ? ` · ${who}` : "";
  switch (e.kind) {
    case "saved": case "copied": return `${e.kind === "copied" ? `→ ${e.tier}, ` : ""}${number(e.num_tokens)} tokens${e.num_bytes ? `, ${size(e.num_bytes)}` : ""}${of}`;
    case "hit": return `${number(e.num_tokens)} tokens loaded${e.count > 1 ? ` by ${number(e.count)} requests` : ""}${of}`;
    case "removed": return `${count(e.num_chunks, "chunk")} removed`;
    case "cleared": return "chunks were cleared";
    case "lost": return "events came too fast to list them all";
    case "breaker": return `${e.tier}: breaker ${e.text}`;
    default: return `${e.text}${of}`;
  }
}
function drawActivity(fresh) {
  const list = $("activity");
  if (!state.entries.length) {
    list.replaceChildren(make("li", { class: "none" }, state.quiet));
    return;
  }
  list.querySelector(".none")?.remove();
  for (const e of fresh) {
    const text = make("span", {}, sentence(e), e.key ? " " : "", e.key ? make("span", { class: "key" }, e.key) : "");
    const line = make("li", { class: `${e.kind} new`, "data-kind": e.kind, "data-sequence": e.sequence, "data-tokens": e.num_tokens }, make("b", {}, WORDS[e.kind] ?? e.kind), text, make("time", {}, clock(e.time_s)));
    list.prepend(line);
  }
  while (list.children.length > MAX_ENTRIES) list.lastElementChild.remove();
}

// ---- asking ---------------------------------------------------------------------------------------------------------
const NOTICES = {
  none: ["This server runs without a pool", "It was started with --no-pool, so that no KV is shared or kept. Its other figures are at /metrics."],
  absent: ["The pool is not there", "It was removed, or nobody has made it yet. This page goes on looking."],
  unreadable: ["The pool cannot be read", ""],
  private: ["The pool has no figures yet", "It is private memory of this server's engine, which reports once it has worked."],
};
function show(answer) {
  const { look, server } = answer;
  if (answer.session !== state.session) Object.assign(state, { session: answer.session, points: [], entries: [] });
  if (!state.entries.length) $("activity").replaceChildren();
  state.look = look;
  state.clock = look.time_s;
  // Points that are later than now are from before the clock was set back.
  state.points = state.points.filter((point) => point.time_s <= look.time_s).concat(answer.points).slice(-MAX_POINTS);
  const seen = state.entries.length ? state.entries[state.entries.length - 1].sequence : 0;
  const fresh = look.events.filter((entry) => entry.sequence > seen);
  state.entries = state.entries.concat(fresh).slice(-MAX_ENTRIES);
  $("model").textContent = server.model;
  $("pool").textContent = look.pool.urls.join(", ");
  $("foot").textContent = `Headwater ${server.version} · ${number(server.running)} running, ${number(server.waiting)} waiting · looking through the pool took ${(1000 * look.survey_s).toFixed(1)} ms`;
  const has = look.store !== null;
  $("notice").hidden = has;
  if (!has) {
    const [title, text] = NOTICES[look.pool.state] ?? NOTICES.unreadable;
    $("notice").children[0].textContent = title;
    $("notice").children[1].textContent = text || look.pool.why;
  }
  for (const id of ["tiles", "charts", "lists"]) $(id).hidden = !has;
  for (const id of ["prefixes-card", "holders-card"]) $(id).hidden = answer.hides_prefixes;
  state.quiet = answer.hides_prefixes ? "Single prefixes are not shown: each request to this server needs a salt of its own." : "Loads and saves show up here as they happen.";
  if (has) { drawTiles(look); drawCharts(); drawTables(look); drawActivity(fresh); }
}
function status(text, kind = "") {
  $("status").textContent = text;
  $("status").className = `pill ${kind}`;
}
async function ask() {
  const points = state.points, entries = state.entries;
  const query = new URLSearchParams({ session: state.session, since: points.length ? points[points.length - 1].number : 0, event: entries.length ? entries[entries.length - 1].sequence : 0 });
  const headers = state.key ? { authorization: `Bearer ${state.key}` } : {};
  const reply = await fetch(`/watch.json?${query}`, { headers, cache: "no-store", signal: AbortSignal.timeout(15000) });
  if (reply.status === 401) {
    $("refused").hidden = state.key === null;
    forget();
    return;
  }
  if (!reply.ok) throw new Error(`status ${reply.status}`);
  show(await reply.json());
  $("ask").hidden = true;
  $("forget").hidden = state.key === null;
  if (state.key) sessionStorage.setItem(KEY, state.key);
  status("Live", "live");
}
function forget() {
  state.key = null;
  sessionStorage.removeItem(KEY);
  Object.assign(state, { session: "", points: [], entries: [], look: null });
  for (const id of ["tiles", "charts", "lists", "notice", "forget"]) $(id).hidden = true;
  for (const id of ["model", "pool", "foot"]) $(id).textContent = "";
  $("ask").hidden = false;
  status("Key needed");
}
async function loop() {
  if (!document.hidden && $("ask").hidden) {
    try { await ask(); } catch (error) { status("No answer", "bad"); }
  }
  setTimeout(loop, EVERY_MS);
}
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value.trim();
  $("key").value = "";
  ask().catch(() => status("No answer", "bad"));
});
$("forget").addEventListener("click", () => { $("refused").hidden = true; forget(); });
window.addEventListener("resize", () => { if (state.look?.store) drawCharts(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && $("ask").hidden) ask().catch(() => status("No answer", "bad")); });
loop();
