// @ts-check
// The page at /tree: KV files as a tree of forks, drawn on a canvas, with a tree of ARIA items above it.
// The server sends what has changed. Texts are inserted as text, never as HTML, and names lose control characters.

import { $, events, failed, hide, json, make, onKey, request, showsTokens, tell, token } from "/page/common.js";

/**
 * A file as the server describes it. Facts that are false, 0 or unknown are missing.
 * @typedef {{ino: number, gone?: boolean, path?: string, uid?: number, tokens?: number, pages?: number,
 *     readable?: boolean, origin?: number, shared?: number, memory_pages?: number, program?: string}} FileFacts
 */

const ROW = 20, INDENT = 14, FADE_MS = 1500, AGAIN_MS = 1000, COLOURS = 8, MANY = 400, FEW = 40, NODE_MS = 0.02;
const NO_CONTROLS = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** Return a text without characters that change how the text around it is shown. @param {string} text */
const plain = (text) => text.replace(NO_CONTROLS, "\ufffd");

class Node {
    /** @param {FileFacts} facts */
    constructor(facts) {
        this.facts = facts;
        /** @type {Node | null} */
        this.origin = null;
        /** @type {Set<Node>} */
        this.children = new Set();
        /** @type {boolean | null} whether the user has opened or closed it; null: neither */
        this.isOpen = null;
        this.goneAt = 0; // when the file went; 0: it lives
        this.size = 1; // nodes in the subtree
        this.depth = 0;
        this.place = 1; // among the forks of the origin, from 1 on
        this.left = 0; // where the own part begins, and how wide it is, in units of `scale`
        this.width = 0;
    }

    get name() {
        const { path, ino } = this.facts;
        return path === undefined ? `#${ino}` : plain(path);
    }

    get length() { return this.facts.tokens ?? 0; }

    get shared() { return Math.min(this.facts.shared ?? 0, this.length); }
}

// ---- what is known

/** @type {Map<number, Node>} */
const nodes = new Map();
/** @type {Map<string, string>} names of programs, by id */
const programs = new Map();
/** @type {string[]} programs in the order in which they came: their place gives their colour */
const order = [];
let since = 0, isNew = true; // isNew: the tree has another shape than the one that was laid out

/** @param {Node} node @param {number} origin */
function hang(node, origin) {
    const above = nodes.get(origin) ?? null;
    if (above === node.origin) return;
    for (let each = above; each; each = each.origin) if (each === node) return; // numbers can't make a circle; data might
    node.origin?.children.delete(node);
    node.origin = above;
    above?.children.add(node);
}

/** Drop a file, and those above it that only stayed because of it. @param {Node | null} node */
function drop(node) {
    while (node) {
        /** @type {Node | null} */
        const above = node.origin;
        nodes.delete(node.facts.ino);
        above?.children.delete(node);
        for (const child of node.children) child.origin = null;
        node = above?.goneAt && !above.children.size ? above : null;
    }
    isNew = true;
}

/** @param {FileFacts} facts */
function learn(facts) {
    let node = nodes.get(facts.ino);
    if (facts.gone) {
        if (!node) {
            if (!facts.tokens) return; // a number alone
            nodes.set(facts.ino, node = new Node(facts));
        }
        node.goneAt ||= performance.now();
    } else if (node) {
        node.facts = facts;
        node.goneAt = 0;
    } else {
        nodes.set(facts.ino, node = new Node(facts));
    }
    if (facts.program && !order.includes(facts.program)) order.push(facts.program);
    isNew = true;
}

/** Take an event of the stream. @param {{since: number, whole?: boolean, files: FileFacts[], programs?: Record<string, string>}} event */
function take(event) {
    since = event.since;
    for (const [id, name] of Object.entries(event.programs ?? {})) programs.set(id, plain(name));
    if (event.whole) {
        const known = new Set(event.files.map(({ ino }) => ino));
        for (const node of [...nodes.values()]) if (!known.has(node.facts.ino)) drop(node);
    }
    for (const facts of event.files) learn(facts);
    for (const { ino, origin } of event.files) {
        const node = nodes.get(ino);
        if (node && origin !== undefined) hang(node, origin);
    }
    if (event.files.length || event.programs || event.whole) draw();
}

/** Drop what has faded away. A file that is gone stays as long as forks of it are there. */
function forget() {
    const now = performance.now();
    let isFading = false;
    for (const node of [...nodes.values()]) {
        if (!node.goneAt) continue;
        if (now - node.goneAt < FADE_MS) isFading = true;
        else if (!node.children.size) drop(node);
    }
    return isFading;
}

// ---- the layout: a row for each shown file

/** @type {Node[]} */
let rows = [];
let widest = 1, numRoots = 0;
/** @type {number} the chosen file; 0: none */
let chosen = 0;
let wanted = ""; // what is searched for

/** Lengths differ by a thousand, so a bar is as long as the root of its tokens. @param {number} num */
const units = (num) => Math.sqrt(num);

/** @param {Node} node */
const programOf = ({ facts }) => (facts.program ? programs.get(facts.program) ?? facts.program : "");

/** @param {Node} node */
const isFound = (node) => `${node.name} ${programOf(node)}`.toLowerCase().includes(wanted);

/** @param {Node} node */
function isOpen(node) {
    return node.isOpen ?? (wanted !== "" || node.depth === 0 || node.size <= FEW || nodes.size <= MANY);
}

/** @param {Node} a @param {Node} b */
const byPlace = (a, b) => a.shared - b.shared || a.facts.ino - b.facts.ino;
/** @param {Node} a @param {Node} b */
const byName = (a, b) => (a.facts.path === undefined ? 1 : 0) - (b.facts.path === undefined ? 1 : 0) || (a.name < b.name ? -1 : a.name > b.name ? 1 : 0) || a.facts.ino - b.facts.ino;

/** Make `rows` of the tree. */
function layOut() {
    const roots = [...nodes.values()].filter(({ origin }) => !origin).sort(byName);
    /** @type {Node[]} */
    const all = [], stack = roots.slice().reverse();
    const number = (/** @type {Node} */ node, /** @type {number} */ at) => { node.place = at + 1; };
    roots.forEach(number);
    numRoots = roots.length;
    while (stack.length) { // origins before their forks
        const node = /** @type {Node} */ (stack.pop()), { origin } = node;
        node.depth = origin ? origin.depth + 1 : 0;
        node.width = units(node.length - node.shared);
        const own = origin ? Math.max(1, origin.length - origin.shared) : 1;
        node.left = origin ? origin.left + origin.width * Math.min(1, Math.max(0, (node.shared - origin.shared) / own)) : 0;
        node.size = 1;
        all.push(node);
        const children = [...node.children].sort(byPlace);
        children.forEach(number);
        for (const child of children.reverse()) stack.push(child);
    }
    /** @type {Set<Node>} */
    const kept = new Set();
    for (const node of all.slice().reverse()) {
        if (node.origin) node.origin.size += node.size;
        if (wanted && (kept.has(node) || isFound(node))) {
            kept.add(node);
            if (node.origin) kept.add(node.origin);
        }
    }
    rows = [];
    widest = 1;
    let closed = Infinity; // depth below which rows are hidden
    for (const node of all) {
        if (node.depth > closed) continue;
        closed = node.children.size && !isOpen(node) ? node.depth : Infinity;
        if (wanted && !kept.has(node)) continue;
        rows.push(node);
        widest = Math.max(widest, node.left + node.width);
    }
    isNew = false;
    $("height").style.height = `${rows.length * ROW}px`;
    let numFiles = 0, numForks = 0, numTokens = 0, numShared = 0;
    for (const node of all) {
        if (node.goneAt) continue;
        if (node.facts.path === undefined) numForks++;
        else numFiles++;
        numTokens += node.length;
        numShared += node.shared;
    }
    $("num-files").textContent = String(numFiles);
    $("num-forks").textContent = String(numForks);
    $("num-tokens").textContent = String(numTokens);
    $("num-shared").textContent = numTokens ? `${Math.round(100 * numShared / numTokens)} %` : "–";
}

// ---- the picture

const place = /** @type {HTMLElement} */ ($("tree")), canvas = /** @type {HTMLCanvasElement} */ ($("canvas"));
const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
let isDue = false, laidOutAt = 0; // laidOutAt: when the tree was laid out last

/** Draw soon. */
function draw() {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
        isDue = false;
        const isFading = forget(), isEarly = isNew && performance.now() - laidOutAt < nodes.size * NODE_MS;
        if (isNew && !isEarly) {
            layOut();
            laidOutAt = performance.now();
        }
        if (isEarly) setTimeout(draw, 50);
        paint();
        mirror();
        if (isFading) setTimeout(draw, 100);
    });
}

/** @param {Node} node @param {string[]} colours */
function colourOf({ facts }, colours) {
    if (/** @type {HTMLSelectElement} */ ($("colours")).value === "memory") {
        const inMemory = facts.memory_pages ?? 0;
        return colours[inMemory === (facts.pages ?? 0) ? 0 : inMemory ? 6 : 7];
    }
    return facts.program ? colours[order.indexOf(facts.program) % (COLOURS - 1)] : colours[COLOURS - 1];
}

/** @param {CSSStyleDeclaration} style */
const coloursOf = (style) => Array.from({ length: COLOURS }, (_, at) => style.getPropertyValue(`--c${at}`).trim());

function paint() {
    const width = place.clientWidth, height = place.clientHeight, ratio = devicePixelRatio;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
        canvas.style.height = `${height}px`;
    }
    const style = getComputedStyle(document.documentElement), colours = coloursOf(style), now = performance.now();
    const [ink, faint, line, wash] = ["--ink", "--faint", "--line", "--wash"].map((name) => style.getPropertyValue(name).trim());
    const names = Math.min(360, width * 0.45), scale = (width - names - 90) / widest;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `13px ${style.fontFamily || "sans-serif"}`;
    pen.direction = "ltr";
    pen.textBaseline = "middle";
    const first = Math.floor(place.scrollTop / ROW), stop = Math.min(rows.length, first + Math.ceil(height / ROW) + 1);
    for (let at = first; at < stop; at++) {
        const node = rows[at], y = at * ROW - place.scrollTop, middle = y + ROW / 2, x = 6 + INDENT * Math.min(node.depth, 12);
        if (node.facts.ino === chosen) {
            pen.fillStyle = wash;
            pen.fillRect(0, y, width, ROW);
        }
        pen.globalAlpha = node.goneAt ? Math.max(0.25, 1 - (now - node.goneAt) / FADE_MS) : 1;
        pen.fillStyle = faint;
        if (node.children.size) pen.fillText(isOpen(node) ? "▾" : "▸", x, middle);
        pen.save();
        pen.beginPath();
        pen.rect(x + 12, y, names - x - 16, ROW);
        pen.clip();
        pen.fillStyle = wanted && isFound(node) ? colours[0] : node.facts.path === undefined ? faint : ink;
        pen.fillText(label(node), x + 12, middle);
        pen.restore();
        const left = names + node.left * scale;
        pen.strokeStyle = line;
        pen.beginPath();
        pen.moveTo(names, middle + 0.5);
        pen.lineTo(left, middle + 0.5);
        pen.stroke();
        pen.fillStyle = colourOf(node, colours);
        if (node.goneAt) {
            pen.strokeStyle = colourOf(node, colours);
            pen.strokeRect(left + 0.5, y + 5.5, Math.max(2, node.width * scale), ROW - 11);
        } else {
            pen.fillRect(left, y + 5, Math.max(2, node.width * scale), ROW - 10);
        }
        pen.fillStyle = faint;
        pen.fillText(String(node.length), left + Math.max(2, node.width * scale) + 6, middle);
        pen.globalAlpha = 1;
    }
    legend(colours);
}

/** @param {Node} node */
const label = (node) => (node.size > 1 && !isOpen(node) ? `${node.name}  +${node.size - 1}` : node.name);

let told = ""; // the legend that is shown

/** @param {string[]} colours */
function legend(colours) {
    const byMemory = /** @type {HTMLSelectElement} */ ($("colours")).value === "memory";
    /** @type {[string, string][]} */
    const shown = byMemory
        ? [["in memory", colours[0]], ["in both", colours[6]], ["on disk", colours[7]]]
        : order.slice(0, COLOURS - 1).map((id, at) => [programs.get(id) ?? id, colours[at]]);
    if (told === (told = JSON.stringify(shown))) return;
    $("legend").replaceChildren(...shown.map(([name, colour]) => {
        const item = make("li", name, { title: name });
        item.style.color = colour;
        return item;
    }));
}

// ---- the same rows for a keyboard and for a screen reader

/** @param {Node} node */
function said(node) {
    const { facts } = node, parts = [node.facts.path === undefined ? `fork ${node.name}` : node.name, `${node.length} tokens`];
    if (facts.shared) parts.push(`${node.shared} shared`);
    if (facts.program) parts.push(programOf(node));
    if (node.goneAt) parts.push("closed");
    return parts.join(", ");
}

/** Show the rows that can be seen, and the chosen row, as items of the tree. */
function mirror() {
    const first = Math.floor(place.scrollTop / ROW), stop = first + Math.ceil(place.clientHeight / ROW) + 1;
    const at = rows.findIndex(({ facts }) => facts.ino === chosen);
    const shown = rows.slice(first, stop).map((node, index) => /** @type {[Node, number]} */ ([node, first + index]));
    if (at >= 0 && (at < first || at >= stop)) shown.push([rows[at], at]);
    const items = $("items");
    while (items.children.length > shown.length) items.lastElementChild.remove();
    while (items.children.length < shown.length) items.append(make("div", "", { role: "treeitem" }));
    for (const [index, [node, row]] of shown.entries()) {
        const item = items.children[index], text = said(node);
        if (item.textContent !== text) item.textContent = text;
        item.id = `file-${node.facts.ino}`;
        item.style.top = `${row * ROW}px`;
        item.dataset.ino = String(node.facts.ino);
        item.setAttribute("aria-level", String(node.depth + 1));
        item.setAttribute("aria-posinset", String(node.place));
        item.setAttribute("aria-setsize", String(node.origin?.children.size ?? numRoots));
        item.setAttribute("aria-selected", String(node.facts.ino === chosen));
        if (node.children.size) item.setAttribute("aria-expanded", String(isOpen(node)));
        else item.removeAttribute("aria-expanded");
    }
    if (at >= 0) place.setAttribute("aria-activedescendant", `file-${chosen}`);
    else place.removeAttribute("aria-activedescendant");
}

/** @param {Node | undefined} node */
function choose(node) {
    if (!node) return;
    chosen = node.facts.ino;
    const top = rows.indexOf(node) * ROW;
    if (top < place.scrollTop) place.scrollTop = top;
    if (top + ROW > place.scrollTop + place.clientHeight) place.scrollTop = top + ROW - place.clientHeight;
    describe(node);
    draw();
}

/** @param {Node} node @param {boolean} toOpen */
function setOpen(node, toOpen) {
    node.isOpen = toOpen;
    isNew = true;
    draw();
}

place.addEventListener("keydown", (event) => {
    const at = rows.findIndex(({ facts }) => facts.ino === chosen), node = rows[at], page = Math.floor(place.clientHeight / ROW);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1, PageDown: at + page, PageUp: at - page }[event.key];
    if (to !== undefined) choose(rows[Math.max(0, Math.min(rows.length - 1, to))]);
    else if (!node) return;
    else if (event.key === "ArrowRight") {
        if (node.children.size && !isOpen(node)) setOpen(node, true);
        else if (node.children.size) choose(rows[at + 1]);
    } else if (event.key === "ArrowLeft") {
        if (node.children.size && isOpen(node)) setOpen(node, false);
        else if (node.origin) choose(node.origin);
    } else if (event.key === "Enter" || event.key === " ") look(node);
    else return;
    event.preventDefault();
});
$("items").addEventListener("click", (/** @type {MouseEvent} */ event) => {
    const node = nodes.get(Number(/** @type {HTMLElement} */ (event.target).dataset.ino));
    if (!node) return;
    choose(node);
    place.focus();
    if (node.children.size && event.offsetX < 18 + INDENT * Math.min(node.depth, 12)) setOpen(node, !isOpen(node));
    else look(node);
});
place.addEventListener("scroll", draw);
new ResizeObserver(draw).observe(place);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
$("looking").onsubmit = (/** @type {Event} */ event) => event.preventDefault();
$("colours").onchange = draw;
$("search").oninput = () => {
    wanted = $("search").value.trim().toLowerCase();
    isNew = true;
    draw();
};

// ---- a context

let text = { path: "", first: 0, next: 0, tokens: 0 }; // what of which file is shown
/** @type {HTMLElement[]} */
let spans = [];

/** @param {Node} node */
function describe(node) {
    const { facts } = node, pages = facts.pages ?? 0;
    $("title").textContent = node.name;
    $("size").textContent = `${node.length} tokens`;
    /** @type {[string, string][]} */
    const found = [["number", String(facts.ino)], ["owner", `uid ${facts.uid ?? 0}`], ["pages", String(pages)]];
    if (facts.readable) {
        found.push(["in memory", `${facts.memory_pages ?? 0} of ${pages}`], ["origin", node.origin?.name ?? (facts.origin ? `#${facts.origin}` : "none")]);
        if (facts.origin) found.push(["shared", `${node.shared} tokens`]);
        if (facts.program) found.push(["program", programOf(node)]);
    }
    $("facts").replaceChildren(...found.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

/** Show the text of a file. @param {Node} node */
function look({ facts }) {
    if (!facts.readable || facts.path === undefined) {
        show({ path: "", first: 0, tokens: 0, texts: [] });
        tell(facts.path === undefined ? "A fork without a name can't be opened by others" : "You may not read this file", true);
        return;
    }
    read(facts.path, 0).catch(failed);
}

/** @param {string} path @param {number} first */
async function read(path, first) {
    show(await json(`/tree/tokens?${new URLSearchParams({ path, first: String(first) })}`));
    tell(`${plain(path)}: tokens ${text.first} to ${text.next}`);
}

/** @param {{path: string, first: number, tokens: number, texts: string[]}} found */
function show({ path, first, tokens, texts }) {
    hide();
    text = { path, first, next: first + texts.length, tokens };
    spans = texts.map((each) => token(each.replace(NO_CONTROLS, (mark) => (mark === "\n" || mark === "\t" ? mark : "\ufffd")), []));
    $("log").replaceChildren(...spans);
    $("log").scrollTop = 0;
    $("earlier").disabled = first === 0;
    $("later").disabled = text.next >= tokens;
    $("odds").disabled = !texts.length;
}

const STEP = 1024;
$("earlier").onclick = () => read(text.path, Math.max(0, text.first - STEP)).catch(failed);
$("later").onclick = () => read(text.path, text.next).catch(failed);
$("odds").onclick = async () => {
    const from = Math.max(0, spans.findIndex((span) => !("isKnown" in span.dataset))), { path, first } = text;
    try {
        $("odds").disabled = true;
        const { odds } = await json("/tree/odds", { path, first: first + from });
        if (path !== text.path || first !== text.first) return;
        for (const [at, each] of odds.entries()) {
            const span = spans[from + at];
            if (!span) break;
            span.dataset.isKnown = "";
            if (each === null) continue;
            /** @type {any} */ (span).distributions = [each];
            span.classList.toggle("unlikely", each.logprob < Math.log(0.5));
            span.classList.toggle("rare", each.logprob < Math.log(0.1));
        }
        tell(`Probabilities of ${odds.length} tokens from ${first + from} on were computed again; point at a token, or use the arrow keys`);
    } catch (error) { failed(error); } finally {
        $("odds").disabled = !spans.some((span) => !("isKnown" in span.dataset));
    }
};
showsTokens($("log"));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

// ---- the stream

/** @type {AbortController | null} */
let stream = null;

/** Read the stream until it ends; after a pause, read on where it ended. */
async function listen() {
    stream?.abort();
    const own = stream = new AbortController();
    if ($("key").value && !crypto.subtle) {
        tell("This browser can't prove who has the key: open the page over HTTPS, or on this machine", true);
        return;
    }
    while (own === stream && !document.hidden) {
        try {
            const answer = await request(`/tree/changes?since=${since}`, { signal: own.signal });
            for await (const event of events(answer)) {
                if (event.error) throw new Error(event.error.message);
                take(event);
            }
        } catch (error) { if (own === stream) failed(error); }
        if (own === stream) await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
}

onKey(() => { since = 0; listen(); });
document.addEventListener("visibilitychange", () => {
    if (document.hidden) stream?.abort();
    else listen();
});
listen();
