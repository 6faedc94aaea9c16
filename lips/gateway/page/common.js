// @ts-check
// What the gateway's pages share: the key, requests, and the distributions of tokens.

/** Return an element of the page. @type {(id: string) => any} */
export const $ = (id) => document.getElementById(id);
/** Make an element with a text. @type {(tag: string, text?: string, properties?: object) => any} */
export const make = (tag, text = "", properties = {}) => Object.assign(document.createElement(tag), { textContent: text }, properties);

// Without a certificate, another server on this port could serve a page that reads the stored key.
const store = location.protocol === "https:" ? sessionStorage : null;
$("key").value = new URLSearchParams(location.hash.slice(1)).get("key") ?? store?.getItem("key") ?? "";
if (location.hash) history.replaceState(null, "", location.pathname);
let newKey = () => {};
$("settings").onsubmit = (/** @type {Event} */ event) => event.preventDefault();
$("key").addEventListener("change", () => { store?.setItem("key", $("key").value); forgetProof(); newKey(); });

/** Have a function called when the user gives another key. @param {() => void} heard */
export function onKey(heard) { newKey = heard; }

/** Show a line of status. @param {string} text */
export function tell(text, isWrong = false) {
    $("status").textContent = text;
    $("status").classList.toggle("wrong", isWrong);
}

// ---- the key: a program could take an ended gateway's port, so the server first proves that it knows the key

/** @type {Promise<void> | null} */
let proof = null; // promise of the current server's proof; null: no proof, or its connection was lost
/** @type {AbortController | null} */
let ends = null; // aborts the connection of the proof

export function forgetProof(connection = ends) {
    if (connection !== ends) return; // an earlier connection
    proof = null;
    ends?.abort();
}

/** @param {string} text */
const bytes = (text) => new TextEncoder().encode(text);
/** @param {ArrayBuffer | Uint8Array} buffer */
const hex = (buffer) => Array.from(new Uint8Array(buffer), (each) => each.toString(16).padStart(2, "0")).join("");

/** @param {string} key */
async function prove(key) {
    const connection = ends = new AbortController();
    try {
        await proven(key, connection);
    } catch (error) {
        forgetProof(connection);
        throw error;
    }
}

/** @param {string} key @param {AbortController} connection */
async function proven(key, connection) {
    const digest = await crypto.subtle.digest("SHA-256", bytes(key));
    const signer = await crypto.subtle.importKey("raw", digest, { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
    /** @param {string} side */
    const signed = async (side) => hex(await crypto.subtle.sign("HMAC", signer, bytes(`${side} ${challenge}`)));
    const challenge = hex(crypto.getRandomValues(new Uint8Array(32)));
    const answer = await checked(await fetch(`/proof?challenge=${challenge}&proof=${await signed("page")}`, { signal: connection.signal }));
    const coming = events(answer), { value } = await coming.next();
    if (value?.proof !== await signed("gateway")) throw new Error("The server here does not know the key, so the page does not send it");
    coming.next().catch(() => {}).then(() => forgetProof(connection)); // the answer stays open until the server ends
}

/** Return an answer, or throw its error. @param {Response} answer */
async function checked(answer) {
    if (answer.ok) return answer;
    let message = `${answer.status} ${answer.statusText}`, code = null;
    try { ({ message, code } = (await answer.json()).error); } catch { /* no JSON: show the status */ }
    if (code === "invalid_api_key") {
        /** @type {HTMLDetailsElement} */ (document.querySelector("details")).open = true;
        message += " (Settings: Key)";
    }
    throw new Error(message);
}

/** Send a request, with the key if there is one. @param {string} path @param {RequestInit} options */
export async function request(path, options = {}) {
    /** @type {Record<string, string>} */
    const headers = { .../** @type {Record<string, string>} */ (options.headers) }, key = $("key").value;
    if (key) {
        if (crypto.subtle) await (proof ??= prove(key));
        headers.authorization = `Bearer ${key}`;
    }
    return checked(await fetch(path, { ...options, headers }).catch((error) => {
        if (error.name !== "AbortError") forgetProof();
        throw error;
    }));
}

/** Return the JSON of an answer. @type {(path: string, body?: object) => Promise<any>} */
export const json = async (path, body) => (await request(path, body === undefined ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
})).json();
/** Show an error. @param {any} error */
export const failed = (error) => { if (error.name !== "AbortError") tell(error.message, true); };

/** Yield the events of a stream. @param {Response} answer @returns {AsyncGenerator<any, void, void>} */
export async function* events(answer) {
    let rest = "";
    for await (const part of /** @type {ReadableStream<any>} */ (answer.body).pipeThrough(new TextDecoderStream())) {
        const lines = (rest + part).split("\n");
        rest = lines.pop() ?? "";
        for (const line of lines) {
            if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
        }
    }
}

// ---- the distribution of each token: shown under the pointer, or at the token that the arrow keys select

/** Make the element of a token. @param {string} text @param {object[]} logprobs */
export function token(text, logprobs) {
    const span = make("span", text, { className: "token" });
    span.distributions = logprobs;
    return span;
}

/** @type {any} */
let shown = null; // the token whose distribution is shown

export function hide() {
    shown?.classList.remove("shown");
    shown = null;
    $("tip").hidden = true;
}

/** @param {any} span */
function showDistribution(span) {
    hide();
    shown = span;
    span.classList.add("shown");
    if (!span.distributions?.length) return;
    const tip = $("tip");
    tip.replaceChildren(...span.distributions.map((/** @type {any} */ { token: drawn, logprob, top_logprobs }) => {
        const likeliest = top_logprobs.map((/** @type {any} */ each) => ({ ...each, isDrawn: each.token === drawn }));
        if (!likeliest.some((/** @type {any} */ { isDrawn }) => isDrawn)) likeliest.push({ token: drawn, logprob, isDrawn: true });
        const table = make("table");
        for (const each of likeliest) {
            const share = Math.exp(each.logprob), row = make("tr", "", { className: each.isDrawn ? "drawn" : "" });
            const bar = make("i");
            bar.style.width = `${Math.round(120 * share)}px`;
            const cell = make("td");
            cell.append(bar);
            row.append(make("td", JSON.stringify(each.token).slice(1, -1)), make("td", `${(100 * share).toFixed(1)} %`), cell);
            table.append(row);
        }
        return table;
    }));
    tip.hidden = false;
    const place = span.getClientRects()[0] ?? span.getBoundingClientRect(), size = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - size.width - 4))}px`;
    tip.style.top = `${place.bottom + size.height + 8 < innerHeight ? place.bottom + 4 : Math.max(4, place.top - size.height - 4)}px`;
}

/** Show distributions of the tokens in an element. @param {HTMLElement} place */
export function showsTokens(place) {
    place.addEventListener("pointerover", (/** @type {any} */ event) => {
        if (event.target.className.startsWith?.("token")) showDistribution(event.target);
    });
    place.addEventListener("pointerout", hide);
    place.addEventListener("scroll", hide);
    place.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const all = [...place.querySelectorAll(".token")], at = all.indexOf(shown);
        const next = all[at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step];
        if (!next) return;
        next.scrollIntoView({ block: "nearest" });
        showDistribution(next);
        const [first] = /** @type {any} */ (next).distributions;
        tell(`${JSON.stringify(next.textContent)}: ${(first?.top_logprobs ?? [])
            .map((/** @type {any} */ each) => `${JSON.stringify(each.token)} ${(100 * Math.exp(each.logprob)).toFixed(1)} %`).join(", ")}`);
    });
}
