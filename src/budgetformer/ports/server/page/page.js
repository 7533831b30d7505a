// The page of a server: a text goes to /inspect, and what ran for it comes back and is drawn.
"use strict";

const SHOWN = 5;
const TYPING_MS = 250;

const $ = (id) => document.getElementById(id);
// Never rounded to a certainty that it is not.
const percent = (share) => {
  if (share > 0 && share < 0.0005) return "<0.1\u00a0%";
  if (share > 0.9995 && share < 1) return ">99.9\u00a0%";
  return `${(100 * share).toFixed(share < 0.0995 || (share > 0.995 && share < 1) ? 1 : 0)}\u00a0%`;
};
const large = (count) => compact.format(count).replace(/(?=[A-Z])/, "\u00a0");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const whole = new Intl.NumberFormat("en");

let info = null;
let secret = null;
let asked = null; // the budget named with the slider; null leaves it to the model
const panes = [];

async function fetched(path, body, signal) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  if (secret !== null) headers.Authorization = `Bearer ${secret}`;
  const method = body === undefined ? "GET" : "POST";
  const answer = await fetch(path, { method, headers, signal, body: JSON.stringify(body) });
  if (answer.ok) return answer.json();
  if (answer.status === 401) askForKey();
  const said = await answer.json().catch(() => ({}));
  throw new Error(said.error ?? `the server answered ${answer.status}`);
}

function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

/* A text and what ran for it. One request is under way at a time; of those asked for meanwhile the last one is sent. */
class Pane {
  constructor(title) {
    this.text = $("text").content.firstElementChild.cloneNode(true);
    this.result = $("result").content.firstElementChild.cloneNode(true);
    this.area = this.text.querySelector("textarea");
    this.note = this.text.querySelector(".note");
    const label = this.text.querySelector("label");
    this.area.id = `text-${title}`;
    label.htmlFor = this.area.id;
    label.textContent = title;
    this.found = null;
    this.full = null; // of the same text with every unit on
    this.fullOf = null;
    this.busy = false;
    this.again = false;
    this.area.addEventListener("input", () => {
      clearTimeout(this.typing);
      this.result.ariaBusy = "true";
      this.typing = setTimeout(() => this.run(), TYPING_MS);
    });
    $("texts").append(this.text);
    $("results").append(this.result);
    this.draw();
  }

  remove() {
    clearTimeout(this.typing);
    this.text.remove();
    this.result.remove();
  }

  async run() {
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    this.result.ariaBusy = "true";
    do {
      this.again = false;
      await this.once();
    } while (this.again);
    this.busy = false;
    this.result.ariaBusy = "false";
  }

  async once() {
    const text = this.area.value;
    if (info === null) return;
    if (!text.trim()) {
      this.found = this.full = this.fullOf = null;
      this.say("");
      draw();
      return;
    }
    try {
      this.found = await fetched("inspect", { text, budget: asked });
      if (this.fullOf !== text) {
        this.full = await fetched("inspect", { text, budget: info.budget.high });
        this.fullOf = text;
      }
      const read = `${whole.format(this.found.tokens)} tokens`;
      this.say(this.found.truncated ? `cut after ${read}, the longest this model reads` : read);
    } catch (error) {
      this.say(error.message, true);
    }
    draw();
  }

  say(text, alarm = false) {
    this.note.textContent = text;
    this.note.classList.toggle("alarm", alarm);
  }

  draw(other) {
    this.result.classList.toggle("empty", this.found === null);
    this.drawUnits(other);
    this.drawClasses();
    this.drawFigures();
  }

  drawUnits(other) {
    const grids = this.result.querySelector(".grids");
    grids.replaceChildren(grid("Heads", "head", info.heads, (layer) => layer.heads, this.found, other));
    if (info.blocks > 1) {
      grids.append(grid("Feed-forward blocks", "block", info.blocks, (layer) => layer.blocks, this.found, other));
    }
  }

  drawClasses() {
    const list = this.result.querySelector(".classes");
    const classes = this.found?.classes ?? [];
    list.replaceChildren(
      ...classes.slice(0, SHOWN).map(({ label, score }, place) => {
        const row = element("li", place === 0 ? "best" : "");
        const name = element("bdi", "name", label);
        name.title = label;
        row.append(name, element("span", "value", percent(score)), bar(element("div", "bar"), score));
        return row;
      }),
    );
    const rest = classes.slice(SHOWN);
    const others = this.result.querySelector(".others");
    others.textContent = rest.length
      ? `${rest.length} more, none above ${percent(rest[0].score)}`
      : classes.length
        ? ""
        : "Type a text, and see what it takes. Each row is a layer, each square a part of it; those that run light up.";
  }

  drawFigures() {
    const found = this.found;
    const full = this.full;
    this.figure("time", found && `${found.engine_ms.toFixed(2)} ms`, full && found && found.engine_ms / full.engine_ms,
      full && `of ${full.engine_ms.toFixed(2)} ms at ${percent(info.budget.high)}`);
    this.figure("flops", found && large(found.flops), found && found.flops / found.flops_dense,
      found && `${percent(found.flops / found.flops_dense)} of the dense model's ${large(found.flops_dense)}`);
    const ran = found ? found.layers.flatMap((layer) => [...layer.heads, ...(layer.blocks ?? [])]) : [];
    const twice = ran.some((times) => times > 1);
    const kinds = info.blocks > 1 ? "heads and blocks" : "heads";
    this.figure("units", found && `${ran.filter(Boolean).length} of ${ran.length}`, found && found.share,
      found && `${percent(found.share)} of the ${kinds}${twice ? "; unsure, so answered again" : ""}`);
  }

  figure(kind, value, part, note) {
    const place = this.result.querySelector(`.figure.${kind}`);
    place.querySelector("dd").textContent = value ?? "–";
    place.querySelector("p").textContent = note ?? "";
    bar(place.querySelector(".bar"), part ?? 0);
  }
}

function bar(place, part) {
  place.style.setProperty("--part", Math.min(1, part));
  return place;
}

/* Layers from top to bottom, units from left to right; with another text beside it, what ran here alone is marked. */
function grid(title, word, columns, of, found, other) {
  const made = element("div", "grid");
  made.style.setProperty("--columns", columns);
  made.append(element("b", "", title));
  const said = [];
  for (let layer = 0; layer < info.layers; layer++) {
    const ran = found ? of(found.layers[layer]) : Array(columns).fill(0);
    const there = other ? of(other.layers[layer]) : null;
    const count = ran.filter(Boolean).length;
    made.append(element("span", "", layer + 1));
    ran.forEach((times, place) => {
      const kind = times === 0 ? "" : there && !there[place] ? "only" : times > 1 ? "twice" : "on";
      const unit = element("i", `unit ${kind}`);
      unit.title = `layer ${layer + 1}, ${word} ${place + 1}: ${["did not run", "ran", "ran twice"][times]}`;
      made.append(unit);
    });
    made.append(element("span", "count", found ? `${count}/${columns}` : ""));
    said.push(`layer ${layer + 1}: ${count} of ${columns}`);
  }
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", found ? `${title} that ran. ${said.join(", ")}` : `${title}, ${info.layers} layers`);
  return made;
}

function draw() {
  const [one, two] = panes.map((pane) => pane.found);
  panes.forEach((pane, place) => pane.draw(place === 0 ? two : one));
  $("common").hidden = !(one && two);
  if (one && two) {
    const units = (found) => found.layers.flatMap((layer) => [...layer.heads, ...(layer.blocks ?? [])]);
    const [left, right] = [units(one), units(two)];
    const both = left.filter((times, place) => times && right[place]).length;
    const only = (ran) => ran.filter(Boolean).length - both;
    $("common").textContent =
      `${both} ran for both texts, ${only(left)} for the first alone, ${only(right)} for the second alone (dotted).`;
  }
  showBudget();
}

function showBudget() {
  const first = panes.find((pane) => pane.found)?.found;
  $("own").setAttribute("aria-pressed", asked === null);
  const share = asked ?? first?.budget ?? first?.share ?? null;
  if (asked === null && share !== null) $("budget").value = share;
  $("share").textContent = share === null ? "–" : percent(share);
  $("budget").setAttribute("aria-valuetext", share === null ? "as the model decides" : percent(share));
}

function runAll() {
  showBudget();
  return Promise.all(panes.map((pane) => pane.run()));
}

function compare(on) {
  $("compare").setAttribute("aria-pressed", on);
  for (const columns of [$("texts"), $("results")]) columns.classList.toggle("two", on);
  panes[0].text.querySelector("label").textContent = on ? "First text" : "Text";
  if (on) panes.push(new Pane("Second text"));
  else panes.pop().remove();
  draw();
  if (on) panes[1].area.focus();
}

function askForKey() {
  $("key").hidden = false;
  $("secret").focus();
}

async function start() {
  try {
    info = await fetched("info");
  } catch (error) {
    $("model").textContent = error.message;
    return;
  }
  const { mode, low, high, target } = info.budget;
  const units = `${info.layers} layers of ${info.heads} heads${info.blocks > 1 ? ` and ${info.blocks} blocks` : ""}`;
  $("model").textContent = `${info.model_id} · ${units} · ${info.model_dtype}`;
  const words = { learned: "As learned", calibrated: "As calibrated", load: "As the load allows", fixed: "As set" };
  $("own").textContent = words[mode];
  Object.assign($("budget"), { min: Math.max(low, 0.05), max: high, value: mode === "learned" ? target : high, disabled: false });
  panes.push(new Pane("Text"));
  draw();
  panes[0].area.focus();
}

$("budget").addEventListener("input", (event) => {
  asked = Number(event.target.value);
  runAll();
});
$("own").addEventListener("click", () => {
  asked = asked === null ? Number($("budget").value) : null;
  runAll();
});
$("compare").addEventListener("click", () => compare(panes.length === 1));
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  secret = $("secret").value;
  $("key").hidden = true;
  if (info === null) start();
  else runAll();
});
start();
