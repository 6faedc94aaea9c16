// The page of the gateway. It uses only routes that any client can use. Text is inserted as text, never as HTML.

import { $, events, failed, forgetProof, hide, json, make, onKey, request, showsTokens, tell, token } from "/page/common.js";

const TOP = 5, LIVE_MS = 1000;

let current = null; // the conversation's name; null: a new one
let asking = null; // aborts the answer in flight
let before = null; // the metrics of a second ago

const of = (name, what = "") => `/sessions/${encodeURIComponent(name)}${what}`;

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
showsTokens($("log"));

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
onKey(refresh);
show(null);
refresh();
live();
