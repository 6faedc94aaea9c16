// The page of the gateway. It uses only routes that any client can use. Text is inserted as text, never as HTML.

const $ = (id) => document.getElementById(id);
const make = (tag, text = "", properties = {}) => Object.assign(document.createElement(tag), { textContent: text }, properties);
const TOP = 5, LIVE_MS = 1000;

let current = null; // the conversation's name; null: a new one
let asking = null; // aborts the answer in flight
let before = null; // the metrics of a second ago

// Without a certificate, another server on this port could serve a page that reads the stored key.
const store = location.protocol === "https:" ? sessionStorage : null;
$("key").value = new URLSearchParams(location.hash.slice(1)).get("key") ?? store?.getItem("key") ?? "";
if (location.hash) history.replaceState(null, "", location.pathname);
$("settings").onsubmit = (event) => event.preventDefault();
$("key").addEventListener("change", () => { store?.setItem("key", $("key").value); forgetProof(); refresh(); });

function tell(text, isWrong = false) {
    $("status").textContent = text;
    $("status").classList.toggle("wrong", isWrong);
}

// ---- the key: a program could take an ended gateway's port, so the server first proves that it knows the key

let proof = null; // promise of the current server's proof; null: no proof, or its connection was lost
let ends = null; // aborts the connection of the proof

function forgetProof(connection = ends) {
    if (connection !== ends) return; // an earlier connection
    proof = null;
    ends?.abort();
}

const bytes = (text) => new TextEncoder().encode(text);
const hex = (buffer) => Array.from(new Uint8Array(buffer), (each) => each.toString(16).padStart(2, "0")).join("");

async function prove(key) {
    const connection = ends = new AbortController();
    try {
        await proven(key, connection);
    } catch (error) {
        forgetProof(connection);
        throw error;
    }
}

async function proven(key, connection) {
    const digest = await crypto.subtle.digest("SHA-256", bytes(key));
    const signer = await crypto.subtle.importKey("raw", digest, { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
    const signed = async (side) => hex(await crypto.subtle.sign("HMAC", signer, bytes(`${side} ${challenge}`)));
    const challenge = hex(crypto.getRandomValues(new Uint8Array(32)));
    const answer = await checked(await fetch(`/proof?challenge=${challenge}&proof=${await signed("page")}`, { signal: connection.signal }));
    const coming = events(answer), { value } = await coming.next();
    if (value?.proof !== await signed("gateway")) throw new Error("The server here does not know the key, so the page does not send it");
    coming.next().catch(() => {}).then(() => forgetProof(connection)); // the answer stays open until the server ends
}

async function checked(answer) {
    if (answer.ok) return answer;
    let message = `${answer.status} ${answer.statusText}`, code = null;
    try { ({ message, code } = (await answer.json()).error); } catch { /* no JSON: show the status */ }
    if (code === "invalid_api_key") {
        document.querySelector("details").open = true;
        message += " (Settings: Key)";
    }
    throw new Error(message);
}

async function request(path, options = {}) {
    const headers = { ...options.headers }, key = $("key").value;
    if (key) {
        if (crypto.subtle) await (proof ??= prove(key));
        headers.authorization = `Bearer ${key}`;
    }
    return checked(await fetch(path, { ...options, headers }).catch((error) => {
        if (error.name !== "AbortError") forgetProof();
        throw error;
    }));
}

const json = async (path, body) => (await request(path, body === undefined ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
})).json();
const of = (name, what = "") => `/sessions/${encodeURIComponent(name)}${what}`;
const failed = (error) => { if (error.name !== "AbortError") tell(error.message, true); };

// ---- conversations

async function refresh() {
    try {
        const { sessions } = await json("/sessions");
        $("sessions").replaceChildren(...sessions.map(({ name, tokens }) => {
            const button = make("button", "", { type: "button", onclick: () => open(name).catch(failed) });
            button.append(make("span", name, { title: name }), make("span", `${tokens} tokens`));
            button.setAttribute("aria-current", String(name === current));
            const item = make("li");
            item.append(button);
            return item;
        }));
        const found = sessions.find(({ name }) => name === current);
        $("size").textContent = found ? `${found.tokens} tokens, ${(found.size / 1e6).toFixed(1)} MB` : "";
    } catch (error) { failed(error); }
}

function show(name) {
    current = name;
    $("title").textContent = name ?? "New conversation";
    $("log").replaceChildren();
    $("forking").hidden = true;
    for (const id of ["undo", "fork", "remove"]) $(id).disabled = name === null;
    $("export").setAttribute("aria-disabled", String(name === null));
    $("export").tabIndex = name === null ? -1 : 0;
    if (name === null) {
        $("export").removeAttribute("href");
        $("log").append(make("p", "This conversation is kept in a file, which a shell can list, copy and remove.", { className: "empty" }));
    } else {
        $("export").href = of(name, "/export");
    }
}

async function open(name) {
    asking?.abort();
    const { messages, tokens } = await json(of(name));
    show(name);
    for (const { role, content } of messages) add(role, content);
    tell(`${name}: ${messages.length} messages, ${tokens} tokens`);
    scroll();
    await refresh();
}

function start() {
    asking?.abort();
    show(null);
    refresh();
    $("question").focus();
}

function nameOf(text) {
    const words = text.toLowerCase().match(/[a-z0-9]+/g) ?? [];
    const stamp = new Date().toISOString().slice(5, 19).replace(/[-:T]/g, "");
    return `${words.slice(0, 4).join("-").slice(0, 40) || "conversation"}-${stamp}`;
}

$("new").onclick = start;
$("undo").onclick = async () => {
    try {
        const { removed } = await json(of(current, "/undo"), {});
        await open(current);
        tell(`${removed} tokens were cut off`);
    } catch (error) { failed(error); }
};
$("remove").onclick = async () => {
    if (!confirm(`Remove ${current}? Its file goes.`)) return;
    try {
        await request(of(current), { method: "DELETE" });
        tell(`${current} was removed`);
        start();
    } catch (error) { failed(error); }
};
$("fork").onclick = () => {
    $("forking").hidden = false;
    $("fork-name").value = `${current}-fork`;
    $("fork-name").select();
};
$("fork-cancel").onclick = () => { $("forking").hidden = true; $("fork").focus(); };
$("forking").onsubmit = async (event) => {
    event.preventDefault();
    try {
        const { name } = await json(of(current, "/fork"), { to: $("fork-name").value });
        await open(name);
        tell(`${name} is a fork: both go on by themselves`);
        $("question").focus();
    } catch (error) { failed(error); }
};
$("export").onclick = async (event) => {
    if (!$("key").value) return; // the plain link works without a key
    event.preventDefault();
    try {
        const link = make("a", "", { href: URL.createObjectURL(await (await request(of(current, "/export"))).blob()) });
        link.download = `${current}.kv`;
        link.click();
        URL.revokeObjectURL(link.href);
    } catch (error) { failed(error); }
};

// ---- talking

function add(role, text = "") {
    $("log").querySelector(".empty")?.remove();
    const turn = make("article", "", { className: `turn ${role}` });
    const said = make("p", text);
    turn.append(make("b", { user: "You", assistant: "The model", system: "System" }[role] ?? role), said);
    $("log").append(turn);
    return said;
}

const scroll = () => { $("log").scrollTop = $("log").scrollHeight; };
const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));

async function* events(answer) {
    let rest = "";
    for await (const part of answer.body.pipeThrough(new TextDecoderStream())) {
        const lines = (rest + part).split("\n");
        rest = lines.pop();
        for (const line of lines) {
            if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
        }
    }
}

async function ask(text) {
    const name = current ?? nameOf(text);
    if (current === null) show(name);
    add("user", text);
    const said = add("assistant");
    scroll();
    asking = new AbortController();
    $("send").hidden = true;
    $("stop").hidden = false;
    $("log").setAttribute("aria-busy", "true");
    tell("The model answers …");
    let whole = "", usage = null;
    try {
        const answer = await request("/v1/chat/completions", {
            method: "POST",
            headers: { "content-type": "application/json" },
            signal: asking.signal,
            body: JSON.stringify({
                messages: [{ role: "user", content: text }], conversation: name, stream: true,
                stream_options: { include_usage: true }, logprobs: true, top_logprobs: TOP,
                temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), seed: number("seed"),
            }),
        });
        for await (const event of events(answer)) {
            if (event.error) throw new Error(event.error.message);
            usage = event.usage ?? usage;
            for (const choice of event.choices ?? []) {
                const piece = choice.delta.content ?? "";
                if (piece) {
                    const isAtEnd = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;
                    said.append(token(piece, choice.logprobs?.content ?? []));
                    whole += piece;
                    if (isAtEnd) scroll();
                }
            }
        }
        const cached = usage?.prompt_tokens_details.cached_tokens ?? 0;
        $("heard").textContent = whole; // a screen reader reads the answer once, not token by token
        tell(`${usage?.completion_tokens ?? 0} tokens; ${cached} of the ${usage?.prompt_tokens ?? 0} before them were not computed again`);
    } catch (error) {
        if (error.name === "AbortError") {
            tell("Stopped. The text so far stays.");
        } else {
            said.append(make("span", error.message, { className: "wrong" }));
            failed(error);
        }
    } finally {
        asking = null;
        $("send").hidden = false;
        $("stop").hidden = true;
        $("log").removeAttribute("aria-busy");
        setTimeout(refresh, 200);
    }
}

$("asking").onsubmit = (event) => {
    event.preventDefault();
    const text = $("question").value.trim();
    if (!text || asking) return;
    $("question").value = "";
    ask(text);
};
$("question").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("asking").requestSubmit();
};
$("stop").onclick = () => asking?.abort();
document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    hide();
    asking?.abort();
});

// ---- the distribution of each token: shown under the pointer, or at the token that the arrow keys select

function token(text, logprobs) {
    const span = make("span", text, { className: "token" });
    span.distributions = logprobs;
    return span;
}

let shown = null;

function hide() {
    shown?.classList.remove("shown");
    shown = null;
    $("tip").hidden = true;
}

function showDistribution(span) {
    hide();
    if (!span.distributions?.length) return;
    shown = span;
    span.classList.add("shown");
    const tip = $("tip");
    tip.replaceChildren(...span.distributions.map(({ token: drawn, logprob, top_logprobs }) => {
        const likeliest = top_logprobs.map((each) => ({ ...each, isDrawn: each.token === drawn }));
        if (!likeliest.some(({ isDrawn }) => isDrawn)) likeliest.push({ token: drawn, logprob, isDrawn: true });
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

$("log").addEventListener("pointerover", (event) => {
    if (event.target.className.startsWith?.("token")) showDistribution(event.target);
});
$("log").addEventListener("pointerout", hide);
$("log").addEventListener("scroll", hide);
$("log").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = [...$("log").querySelectorAll(".token")], at = all.indexOf(shown);
    const next = all[at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step];
    if (!next) return;
    next.scrollIntoView({ block: "nearest" });
    showDistribution(next);
    const [first] = next.distributions;
    tell(`${JSON.stringify(next.textContent)}: ${(first?.top_logprobs ?? [])
        .map((each) => `${JSON.stringify(each.token)} ${(100 * Math.exp(each.logprob)).toFixed(1)} %`).join(", ")}`);
});

// ---- metrics

async function live() {
    if (document.hidden || ($("key").value && !crypto.subtle)) return; // without proof, the key could go to another program on this port
    try {
        const now = await json("/live");
        $("model").textContent = now.model;
        $("place").textContent = now.place;
        $("cached").textContent = now.prompt_tokens ? `${Math.round(100 * now.cached_tokens / now.prompt_tokens)} %` : "–";
        if (now.steps === undefined) return;  // with keys, the server shows no metrics of the whole machine
        const seconds = before ? now.uptime_s - before.uptime_s : 0, steps = before ? now.steps - before.steps : 0;
        if (seconds > 0) {
            $("rate").textContent = Math.round((now.tokens - before.tokens) / seconds);
            $("batch").textContent = steps ? ((now.calls_in_steps - before.calls_in_steps) / steps).toFixed(1) : "0";
        }
        $("kv").textContent = `${(100 * now.kv_used_bytes / now.kv_total_bytes).toFixed(1)} %`;
        before = now;
    } catch { for (const id of ["batch", "rate", "cached", "kv"]) $(id).textContent = "–"; }
}

setInterval(live, LIVE_MS);
document.addEventListener("visibilitychange", () => {
    if (document.hidden) forgetProof(); // browsers allow few connections to one server, for all its pages
    live();
});
show(null);
refresh();
live();
