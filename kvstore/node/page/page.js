"use strict";
// Text goes into the page as text alone: names are other people's.
const $ = (id) => document.getElementById(id);
const make = (tag, text = "", name = "") => {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = name;
  return made;
};
const percent = (share) => `${Math.round(100 * share)}%`;
const bytes = (count) => {
  const unit = count < 1 ? 0 : Math.min(Math.floor(Math.log2(count) / 10), 5);
  const size = count / 1024 ** unit;
  return `${size.toFixed(size < 10 && unit ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
};
const count = (number) => Intl.NumberFormat("en", { notation: "compact" }).format(number);
const age = (s) => {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (s >= length) return `${Math.floor(s / length)} ${unit}`;
  }
  return `${Math.floor(s)} s`;
};

/** A line of numbers, each from 0 to `top`, of so many points when it is whole. */
function sparkline(numbers, points, top, label) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  const x = (i) => 100 - (100 * (numbers.length - 1 - i)) / (points - 1);
  const line = numbers.map((n, i) => `${x(i).toFixed(2)},${(97 - 94 * Math.min(n / (top || 1), 1)).toFixed(1)}`);
  for (const name of numbers.length > 1 ? ["area", "edge"] : []) {
    const drawn = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const ends = name === "area" ? [`${x(0).toFixed(2)},100`, "100,100"] : [];
    drawn.setAttribute("points", [ends[0], ...line, ends[1]].filter(Boolean).join(" "));
    drawn.setAttribute("class", name);
    svg.append(drawn);
  }
  return svg;
}

function card(title, value, note, numbers, top) {
  const made = make("div", "", "card");
  made.append(make("small", title), make("b", value), make("span", note, "note"));
  if (numbers) made.append(sparkline(numbers, 360, top ?? Math.max(...numbers), `${title}, last hour`));
  return made;
}

/** Rows of [label, share of the whole, text behind, class]. */
function bars(id, rows, none) {
  const largest = Math.max(...rows.map((row) => row[1]), 1e-9);
  $(id).replaceChildren(...rows.map(([label, share, text, name = ""]) => {
    const row = make("div", "", "bar");
    const bar = make("i", "", name);
    bar.style.setProperty("--share", `${(100 * share) / largest}%`);
    const first = make("span", label);
    first.title = label;
    row.append(first, bar, make("span", text ?? percent(share)));
    return row;
  }));
  if (!rows.length) $(id).append(make("p", none, "note"));
}

const found = (delta) => (delta.asked_tokens ? (delta.engine_tokens + delta.hit_tokens) / delta.asked_tokens : -1);
const COLUMNS = [ // head, value to sort by, text
  ["Node", (n) => n.name],
  ["Host", (n) => n.host],
  ["State", (n) => n.state],
  ["Tier", (n) => n.tier],
  ["Used", (n) => n.used / n.size, percent],
  ["Of", (n) => n.size, bytes],
  ["In/s", (n) => n.delta.stored_bytes / data.tick_s, bytes],
  ["Out/s", (n) => n.delta.served_bytes / data.tick_s, bytes],
  ["Found", (n) => found(n.delta), (share) => (share < 0 ? "–" : percent(share))],
  ["Evicted/s", (n) => n.delta.evicted / data.tick_s, count],
  ["Up", (n) => n.up_s, age],
];
let data = null;
let sorted = { column: 0, down: false };
const known = new Map(); // by node: its tile and its row, which stay where the focus is

function drawNodes() {
  const words = $("filter").value.toLowerCase();
  const value = COLUMNS[sorted.column][1];
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  const order = (a, b) => (sorted.down ? -1 : 1)
    * (typeof value(a) === "number" ? value(a) - value(b) : compare(value(a), value(b)));
  const living = new Set();
  for (const node of [...data.nodes].sort(order)) {
    const key = JSON.stringify([node.host, node.name]);
    living.add(key);
    if (!known.has(key)) {
      const id = `node-${known.size}`;
      const made = { tile: make("a"), row: make("tr") };
      made.row.id = id;
      made.tile.href = `#${id}`;
      known.set(key, made);
    }
    const { tile, row } = known.get(key);
    const full = node.state === "gone" ? "gone" : percent(node.used / node.size);
    tile.className = node.state;
    tile.title = `${node.name} on ${node.host}: ${full} of ${bytes(node.size)}`;
    tile.setAttribute("aria-label", `${tile.title}, ${node.state}`);
    tile.style.setProperty("--fill", percent(node.used / node.size));
    tile.replaceChildren(make("span", node.name), make("span", node.host, "note"), full);
    row.replaceChildren(...COLUMNS.map(([, of, text = String]) => make("td", text(of(node)))));
    row.cells[2].className = node.state === "alive" ? "" : "bad";
    const drawn = make("td");
    drawn.append(sparkline(node.fill, 60, 100, "how full, last hour"));
    row.append(drawn);
    row.hidden = !`${node.name} ${node.host} ${node.state}`.toLowerCase().includes(words);
    if ($("rows").children[living.size - 1] !== row) $("rows").insertBefore(row, $("rows").children[living.size - 1]);
    if (!tile.isConnected) $("tiles").append(tile);
  }
  for (const [key, made] of known) {
    if (living.has(key)) continue;
    made.tile.remove();
    made.row.remove();
  }
  $("tiles").className = data.nodes.length <= 24 ? "few" : "";
  [...$("heads").children].forEach((head, i) => {
    if (i === sorted.column) head.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
}

function draw() {
  const { history: past, nodes } = data;
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  const now = (name) => (past[name].at(-1) ?? 0) / data.tick_s;
  const alive = nodes.filter((n) => n.state !== "gone");
  const tiers = ["DRAM", "VRAM"].map((tier) => {
    const of = alive.filter((n) => n.tier === tier);
    const [used, size] = [sum(of.map((n) => n.used)), sum(of.map((n) => n.size))];
    return size ? card(`${tier} in use`, percent(used / size), `of ${bytes(size)}`,
      of.length === alive.length ? past.used_bytes.map((n, i) => n / (past.size_bytes[i] || 1)) : null, 1) : null;
  });
  const asked = sum(past.asked_tokens);
  const [engine, store] = [sum(past.engine_tokens), sum(past.hit_tokens)];
  const shares = past.asked_tokens.map((n, i) => (n ? (past.engine_tokens[i] + past.hit_tokens[i]) / n : 0));
  $("cards").replaceChildren(...[
    ...tiers,
    card("Found", asked ? percent((engine + store) / asked) : "–", `of ${count(asked)} tokens`, shares, 1),
    card("Stored", `${bytes(now("stored_bytes"))}/s`, "by engines and clients", past.stored_bytes),
    card("Served", `${bytes(now("served_bytes"))}/s`, "to other hosts", past.served_bytes),
    card("Evicted", `${count(now("evicted"))}/s`, `${count(sum(past.evicted))} in the last hour`, past.evicted),
    card("Nodes", String(alive.length), `on ${new Set(alive.map((n) => n.host)).size} hosts`, past.nodes),
  ].filter(Boolean));
  const of = (tokens, label, name) => [label, tokens / asked, undefined, name];
  bars("found", asked ? [of(engine, "in the engine", "engine"), of(store, "in the store"),
    of(asked - engine - store, "missed", "missed")] : [], "Nobody has asked for a prompt.");
  const missed = sum(data.missed.map((one) => one[1]));
  bars("missed", data.missed.map(([name, n]) => [name.split(":")[1], n / missed, undefined, "missed"]), "Nothing was missed.");
  const { bounds_s: bounds, at_most: atMost } = data.ages;
  const evicted = atMost.at(-1);
  const labels = [...bounds.map((s) => `to ${age(s)}`), `over ${age(bounds.at(-1))}`];
  bars("ages", evicted ? labels.map((label, i) => [label, (atMost[i] - (atMost[i - 1] ?? 0)) / evicted])
    .filter(([, share]) => share > 0) : [], "Nothing was evicted.");
  const stored = sum(data.namespaces.map((one) => one[1]));
  bars("spaces", data.namespaces.map(([name, n]) => [name, n / stored, `${percent(n / stored)} · ${bytes(n)}`]), "No blocks yet.");
  $("events").replaceChildren(...data.events.reverse().map((one) => {
    const line = make("li", "", one.what === "died" ? "bad" : "");
    line.append(make("time", new Date(1000 * one.at).toLocaleTimeString()), `${one.name} on ${one.host} ${one.what}`);
    return line;
  }));
  if (!data.events.length) $("events").append(make("li", "Nodes that join, leave, restart or die are told here.", "note"));
  drawNodes();
  drawEngines();
}

/** Engines of this host; null where the page has no password, and explains nothing. */
function drawEngines() {
  $("explain").hidden = data.engines === null;
  const engines = (data.engines ?? []).map(String);
  if (String([...$("engine").options].map((one) => one.value)) === String(engines)) return;
  const before = $("engine").value;
  $("engine").replaceChildren(...engines.map((pid) => new Option(`process ${pid}`, pid, false, pid === before)));
}

async function explain(event) {
  event.preventDefault();
  const body = JSON.stringify({ engine: Number($("engine").value), kind: $("kind").value, text: $("asked").value });
  const asked = { method: "POST", headers: { "Content-Type": "application/json" }, body };
  $("explained").textContent = "Asking the engine …";
  try {
    $("explained").textContent = await (await fetch(`${location.origin}/explain`, asked)).text();
  } catch (e) {
    $("explained").textContent = `This node does not answer (${e.message}); a question has at most 1 MiB`;
  }
}

async function ask() {
  try {
    const answer = await fetch(`${location.origin}/page.json`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    data = await answer.json();
    const late = data.silent_s === null || data.silent_s > 5;
    $("status").textContent = late
      ? `${data.name} cannot ask the index: what is shown is old`
      : `as ${data.name} sees it, ${new Date(1000 * data.at).toLocaleTimeString()}`;
    $("status").className = late ? "bad" : "";
    draw();
  } catch (e) {
    $("status").textContent = `This node does not answer (${e.message}): what is shown is old`;
    $("status").className = "bad";
  }
  setTimeout(ask, 2000);
}

COLUMNS.forEach(([name], column) => {
  const head = make("th");
  head.scope = "col";
  const button = make("button", name);
  button.addEventListener("click", () => {
    sorted = { column, down: sorted.column === column && !sorted.down };
    if (data) drawNodes();
  });
  head.append(button);
  $("heads").append(head);
});
$("heads").append(make("th", "Last hour"));
$("question").addEventListener("submit", explain);
$("filter").addEventListener("input", () => data && drawNodes());
ask();
