"use strict";

const WAIT_MS = 250; // after the last key
const UNSURE = 0.5; // the probability of a word below which it is underlined
const MAX_ALTERNATIVES = 3;
const RTL_SCRIPTS = new Set("adlm arab aran hebr nkoo rohg syrc thaa".split(" "));
const RTL_LANGUAGES = new Set(  // whose code names no script
  ("acm acq aeb ajp apc ar ara arb arc ars ary arz azb ckb div dv fa fas he heb iw ji kas ks " +
   "lrc mzn nqo pbt per pes pnb prs ps pus sd snd syr ug uig ur urd ydd yi yid").split(" "),
);

const $ = (id) => document.getElementById(id);
const [source, output, mirror] = [$("source"), $("output"), $("mirror")];
const [from, to] = [$("source-language"), $("target-language")];

let settings = { charLimit: -1, maxTexts: 1, maxAlternatives: 0, keyRequired: false };
let languages = [];
let shown = { source: "", text: "", lines: [] }; // the translation on the page
let running = null; // the AbortController of the last request
let timer = 0;
let detected = null;
let activeWord = -1;

function say(text, isError = false) {
  $("message").textContent = text;
  $("message").classList.toggle("error", isError);
}

class AnswerError extends Error {
  constructor(text, status, waitS) {
    super(text);
    [this.status, this.waitS] = [status, waitS];
  }
}

async function ask(path, fields, signal) {
  const options = { signal };
  if (fields) {
    const key = $("api-key").value;
    options.method = "POST";
    options.headers = { "Content-Type": "application/json" };
    options.body = JSON.stringify(key ? { ...fields, api_key: key } : fields);
  }
  const answer = await fetch(path, options);
  const tree = await answer.json().catch(() => ({}));
  if (!answer.ok) {
    const text = tree.error || `The server answered ${answer.status}.`;
    throw new AnswerError(text, answer.status, Number(answer.headers.get("Retry-After") || 1));
  }
  return tree;
}

function remembered(name) {
  try { return localStorage.getItem(`mtrain-${name}`); } catch { return null; }
}

function remember(name, value) {
  try { localStorage.setItem(`mtrain-${name}`, value); } catch { /* a private window */ }
}

function fill(select, entries, value) {
  select.replaceChildren(...entries.map(([code, name]) => new Option(name, code)));
  select.value = value;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
}

function names(codes) {
  return codes.map((code) => [code, languages.find((one) => one.code === code)?.name || code]);
}

function targetsOf(code) {
  if (code === "auto") return [...new Set(settings.detectedLanguages.flatMap(targetsOf))];
  return (languages.find((one) => one.code === code)?.targets || []).filter((one) => one !== code);
}

function directionOf(code) {
  const [language, ...subtags] = code.toLowerCase().split(/[-_]/);
  const script = subtags.find((subtag) => subtag.length === 4);
  return (script ? RTL_SCRIPTS.has(script) : RTL_LANGUAGES.has(language)) ? "rtl" : "ltr";
}

function fillTargets(value) {
  fill(to, names(targetsOf(from.value)), value);
  for (const [element, code] of [[output, to.value], [source, from.value], [mirror, from.value]]) {
    const isAuto = code === "auto";
    element.lang = isAuto ? "" : code.replaceAll("_", "-");
    element.dir = isAuto ? "auto" : directionOf(code);
  }
  const back = from.value === "auto" ? detected : from.value;
  $("swap").disabled = !back || !targetsOf(to.value).includes(back);
}

// The source text again, behind the text field: it gives the field its height, and shows marks.
function drawMirror(ranges = []) {
  const parts = [];
  let at = 0;
  for (const [start, end] of ranges) {
    const mark = document.createElement("mark");
    mark.textContent = source.value.slice(start, end);
    parts.push(source.value.slice(at, start), mark);
    at = end;
  }
  mirror.replaceChildren(...parts, source.value.slice(at));
}

function noteText() {
  drawMirror();
  const count = [...source.value].length;
  const limit = settings.charLimit;
  $("count").textContent = limit > 0 ? `${count} / ${limit}` : `${count}`;
  $("clear").disabled = count === 0;
  clearTimeout(timer);
  timer = setTimeout(translate, WAIT_MS);
}

async function translate() {
  clearTimeout(timer);
  running?.abort();
  const controller = (running = new AbortController());
  const text = source.value;
  if (!text.trim()) {
    show({ translatedText: "", alternatives: [], details: [] }, text);
    say("");
    return;
  }
  output.classList.add("busy");
  output.setAttribute("aria-busy", "true");
  const fields = {
    q: text, source: from.value, target: to.value, details: true,
    alternatives: Math.min(MAX_ALTERNATIVES, settings.maxAlternatives),
  };
  try {
    const tree = await ask("translate", fields, controller.signal);
    if (controller !== running) return;
    detected = tree.detectedLanguage?.language || null;
    show(tree, text);
    sayHow(tree);
  } catch (error) {
    if (controller !== running || error.name === "AbortError") return;
    show({ translatedText: "", alternatives: [], details: [] }, text);
    say(error instanceof AnswerError ? error.message : "The server does not answer.", true);
  }
}

function sayHow(tree) {
  const said = [];
  const found = tree.detectedLanguage;
  if (found) said.push(`From ${names([found.language])[0][1]} (${Math.round(found.confidence)} % sure).`);
  if (tree.pivot) said.push(`Translated by way of ${names([tree.pivot])[0][1]}.`);
  const flags = new Set((tree.details || []).flatMap((line) => line.flags));
  const texts = {
    loop: "it repeats itself", length: "it is very short or very long", limit: "it may be cut off",
    empty: "a line is empty", copy: "a line is a copy of the text",
    unknown: "some characters are unknown to the model", truncated: "the text was cut off",
  };
  const odd = [...flags].map((flag) => texts[flag]).filter(Boolean); // not split and retried
  if (odd.length) said.push(`Check the translation: ${odd.join(", ")}.`);
  say(said.join(" "));
  fillTargets(to.value);
}

// Words of the translation as elements; each knows its line and its number there.
function show(tree, text) {
  output.classList.remove("busy");
  output.removeAttribute("aria-busy");
  const lines = tree.details || [];
  const breaks = text.match(/\r?\n/g) || [];
  shown = { source: text, text: tree.translatedText, lines };
  const parts = [];
  if (!lines.length) parts.push(tree.translatedText);
  lines.forEach((line, row) => {
    parts.push(line.source.match(/^\s*/)[0]); // the indent
    line.words.forEach((word, number) => {
      const element = document.createElement("span");
      element.className = "word";
      const bare = word.trimEnd();
      element.textContent = bare;
      if (line.word_probs[number] < UNSURE) element.classList.add("unsure");
      [element.dataset.line, element.dataset.number] = [row, number];
      parts.push(element, word.slice(bare.length));
    });
    if (row < breaks.length) parts.push("\n");
  });
  output.replaceChildren(...parts);
  activeWord = -1;
  drawMirror();
  $("word").textContent = "";
  $("copy").disabled = !tree.translatedText;
  const others = tree.alternatives || [];
  $("others").hidden = !others.length;
  $("alternatives").replaceChildren(...others.map((other) => {
    const [item, button] = [document.createElement("li"), document.createElement("button")];
    button.type = "button";
    button.lang = output.lang;
    button.dir = "auto";
    button.textContent = other;
    button.title = "Copy this translation";
    button.addEventListener("click", () => copy(other));
    item.append(button);
    return item;
  }));
}

function words() { return [...output.querySelectorAll(".word")]; }

// A word whose direction does not reach what stands beside it.
function isolated(word) { return `\u2068${word}\u2069`; }

function activate(element) {
  for (const one of words()) one.classList.toggle("active", one === element);
  if (!element) {
    drawMirror();
    $("word").textContent = "";
    return;
  }
  const [row, number] = [Number(element.dataset.line), Number(element.dataset.number)];
  const line = shown.lines[row];
  const linked = (line.alignment || []).filter((link) => link[1] === number).map((link) => link[0]);
  const ranges = rangesOf(row, linked);
  drawMirror(ranges);
  const made = ranges.map(([start, end]) => isolated(source.value.slice(start, end))).join(" … ");
  const sure = line.word_probs.length ? ` (${Math.round(100 * line.word_probs[number])} %)` : "";
  $("word").textContent = `${isolated(element.textContent)}${made ? ` ← ${made}` : ""}${sure}`;
}

// Where words of a source line stand in the text field, in UTF-16 code units.
function rangesOf(row, numbers) {
  const starts = [0];
  for (const found of source.value.matchAll(/\r?\n/g)) starts.push(found.index + found[0].length);
  const line = shown.lines[row];
  const ranges = [];
  let at = starts[row] + (line.source.length - line.source_words.join("").length);
  line.source_words.forEach((word, number) => {
    if (numbers.includes(number)) ranges.push([at, at + word.trimEnd().length]);
    at += word.length;
  });
  return ranges;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no secure context, or no permission
    const [field, focused] = [document.createElement("textarea"), document.activeElement];
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    focused.focus({ preventScroll: true });
  }
  say("Copied.");
}

function swap() {
  const back = from.value === "auto" ? detected : from.value;
  const target = to.value;
  if (!back || !targetsOf(target).includes(back)) return;
  from.value = target;
  fillTargets(back);
  remember("from", from.value);
  remember("to", to.value);
  if (shown.text && shown.source === source.value) source.value = shown.text;
  noteText();
  translate();
}

// A file: as many lines out as in, in batches that the server takes.
let job = null;

async function translateFile(file) {
  job?.abort();
  const controller = (job = new AbortController());
  const pair = { source: from.value, target: to.value };
  $("job").hidden = false;
  $("download").hidden = true;
  $("cancel").textContent = "Stop";
  $("job-title").textContent = file.name;
  $("progress").value = 0;
  const status = (text) => { $("job-status").textContent = text; };
  status("");
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    const lines = text.split("\n").map((line) => line.replace(/\r$/, ""));
    const ends = lines.at(-1) === "" ? lines.splice(-1).length : 0;
    const translated = [];
    let most = Infinity; // lines of a batch; grows slowly, since a refusal takes the time limit
    while (translated.length < lines.length) {
      const batch = nextBatch(lines, translated.length, pair).slice(0, most);
      const answer = await askPatiently(batch, pair, controller.signal);
      const count = answer.translatedText.length;
      most = count < batch.length ? count : most * 1.1;
      translated.push(...answer.translatedText);
      $("progress").value = translated.length / lines.length;
      status(`${translated.length} of ${lines.length} lines`);
    }
    if (!lines.length) throw new Error("The file is empty.");
    const blob = new Blob([translated.join("\n") + (ends ? "\n" : "")], { type: "text/plain" });
    const link = $("download");
    URL.revokeObjectURL(link.href);
    link.href = URL.createObjectURL(blob);
    link.download = file.name.replace(/(\.[^.]*)?$/, `.${pair.target}$1`);
    link.hidden = false;
    status(`${lines.length} lines are translated.`);
    $("cancel").textContent = "Close";
    link.focus();
  } catch (error) {
    if (error.name === "AbortError") return;
    status(error instanceof TypeError ? `${file.name} is not UTF-8 text, or the server is gone.` : error.message);
    $("cancel").textContent = "Close";
  }
}

function bytesOf(tree) { return new TextEncoder().encode(JSON.stringify(tree)).length; }

function nextBatch(lines, first, pair) {
  const batch = [];
  let [count, bytes] = [0, bytesOf({ q: [], ...pair, api_key: $("api-key").value })];
  let limit = "";
  for (const line of lines.slice(first, first + settings.maxTexts)) {
    count += [...line].length;
    bytes += bytesOf(line) + 1; // and a comma
    if (settings.charLimit > 0 && count > settings.charLimit) limit = `${settings.charLimit} characters`;
    else if (bytes > settings.maxBody) limit = `the ${settings.maxBody} bytes of a request`;
    if (limit) break;
    batch.push(line);
  }
  if (!batch.length) throw new Error(`Line ${first + 1} has more than ${limit}.`);
  return batch;
}

async function askPatiently(batch, pair, signal) {
  for (let tries = 0; ; tries++) {
    try {
      return await ask("translate", { q: batch, ...pair }, signal);
    } catch (error) {
      if (![429, 503].includes(error.status) || tries >= 20) throw error;
      // together the lines may take longer than the server allows
      if (error.status === 503) batch = batch.slice(0, Math.ceil(batch.length / 2));
      await new Promise((resolve) => setTimeout(resolve, 1000 * error.waitS));
      signal.throwIfAborted();
    }
  }
}

function endJob() {
  job?.abort();
  $("job").hidden = true;
  $("choose").focus();
}

function listen() {
  source.addEventListener("input", noteText);
  from.addEventListener("change", () => { detected = null; fillTargets(to.value); remember("from", from.value); translate(); });
  to.addEventListener("change", () => { fillTargets(to.value); remember("to", to.value); translate(); });
  $("swap").addEventListener("click", swap);
  $("copy").addEventListener("click", () => copy(shown.text));
  $("clear").addEventListener("click", () => { source.value = ""; noteText(); source.focus(); });
  $("choose").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => { if ($("file").files[0]) translateFile($("file").files[0]); $("file").value = ""; });
  $("cancel").addEventListener("click", endJob);
  $("api-key").addEventListener("change", translate);
  $("key-form").addEventListener("submit", (event) => event.preventDefault());
  output.addEventListener("pointerover", (event) => activate(event.target.closest(".word")));
  output.addEventListener("pointerleave", () => activate(null));
  output.addEventListener("blur", () => { activeWord = -1; activate(null); });
  output.addEventListener("keydown", moveWord);
  document.addEventListener("keydown", (event) => {
    const isApple = /^(Mac|iP)/.test(navigator.platform); // where Option makes other characters
    const isS = event.key.toLowerCase() === "s" || (!isApple && event.code === "KeyS");
    if (event.altKey && !event.ctrlKey && isS) { event.preventDefault(); swap(); }
  });
  const pane = source.closest(".pane");
  const hasFiles = (event) => event.dataTransfer.types.includes("Files"); // else it is text
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    pane.classList.add("target-of-drop");
  });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) pane.classList.remove("target-of-drop"); });
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    pane.classList.remove("target-of-drop");
    if (event.dataTransfer.files[0]) translateFile(event.dataTransfer.files[0]);
  });
}

function moveWord(event) {
  const all = words();
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") { activeWord = -1; activate(null); }
  if (!step || !all.length) return;
  event.preventDefault();
  const isMirrored = output.dir === "rtl" && event.key.match(/Left|Right/);
  activeWord = (activeWord + (isMirrored ? -step : step) + all.length + (activeWord < 0 && step < 0 ? 1 : 0)) % all.length;
  activate(all[activeWord]);
}

async function start() {
  try {
    [settings, languages] = await Promise.all([ask("frontend/settings"), ask("languages")]);
  } catch {
    say("The server does not answer.", true);
    return;
  }
  $("key-form").hidden = !settings.keyRequired;
  const sources = languages.filter((one) => targetsOf(one.code).length).map((one) => one.code);
  const auto = targetsOf("auto").length ? [["auto", "Detect the language"]] : [];
  fill(from, [...auto, ...names(sources)], remembered("from") || settings.language.source.code);
  fillTargets(remembered("to") || settings.language.target.code);
  listen();
  noteText();
}

start();
