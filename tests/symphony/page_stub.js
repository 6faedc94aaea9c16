// Runs the script of a page of `symphony trace show` under node, without a browser: elements that keep what is done to
// them, and a pen that keeps what is drawn. Prints one line of JSON. `node page_stub.js PAGE WIDTH HEIGHT [X,Y ...]`,
// points that the pointer moves to; `wheel:X` zooms in by e at X.
const fs = require("fs");

const [, , path, width, height, ...actions] = process.argv;
const html = fs.readFileSync(path, "utf8");
const part = (pattern) => html.match(pattern)[1];
const drawn = [], listeners = {}, elements = {}, told = [], frames = [];
const pen = {
    fillRect(...box) { drawn.push([this.fillStyle, ...box]); },
    fillText(text, x, y) { drawn.push(["text", text, x, y]); },
    setTransform() {},
};
function element(id) {
    return {
        style: {}, hidden: true, textContent: id === "trace" ? part(/<script id="trace"[^>]*>([\s\S]*?)<\/script>/) : "",
        getContext: () => pen,
        getBoundingClientRect: () => ({ left: 0, top: 0, width: Number(width), height: Number(height) }),
        addEventListener(name, action) { listeners[name] = action; },
        setPointerCapture() {},
    };
}
global.document = { documentElement: {}, getElementById: (id) => (elements[id] ??= element(id)) };
global.getComputedStyle = () => ({ getPropertyValue: (name) => name.slice(2) });
global.matchMedia = () => ({ addEventListener() {} });
global.addEventListener = (name, action) => { listeners[name] = action; };
global.innerWidth = Number(width);
global.innerHeight = Number(height);
global.devicePixelRatio = 1;
global.requestAnimationFrame = (draw) => setTimeout(() => { drawn.length = 0; draw(); frames.push(drawn.length); });

async function until(condition) {
    for (let turn = 0; !condition(); turn++) {
        if (turn > 6000) throw new Error("it draws nothing");
        await new Promise((go) => setTimeout(go, 5));
    }
}

async function act() {
    await until(() => frames.length);
    const first = drawn.slice();
    for (const action of actions) {
        const [kind, place] = action.split(":");
        if (kind === "wheel") {
            const before = frames.length;
            listeners.wheel({ preventDefault() {}, deltaY: -400, deltaX: 0, shiftKey: false, clientX: Number(place), clientY: 0 });
            await until(() => frames.length > before);
            continue;
        }
        const [x, y] = action.split(",").map(Number);
        listeners.pointermove({ clientX: x, clientY: y });
        told.push(elements.tip.hidden ? "" : elements.tip.textContent);
    }
    console.log(JSON.stringify({ facts: elements.facts.textContent, first, last: drawn, told }));
}

process.on("unhandledRejection", (error) => { throw error; });
(0, eval)(part(/<script>\n([\s\S]*?)<\/script>/));
act();
