"use strict";
// Draws the trace that the page holds: an axis, the steps, and a lane for each program. All times are microseconds.
// Only what is in sight is looked at. Where more bars than pixels are in sight, each pixel shows its share of them.

const AXIS = 22, STEPS = 110, TITLE = 18, GAP = 6, MIN_SPAN = 5;
const TYPES = { u1: Uint8Array, i1: Int8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array, f8: Float64Array };

async function inflated(text) {
    const letters = atob(text), bytes = new Uint8Array(letters.length);
    for (let place = 0; place < bytes.length; place++) bytes[place] = letters.charCodeAt(place);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
}

// A column as trace_html.py packs it: see `_column` there.
async function column([type, count, isDelta, text]) {
    const numbers = new TYPES[type](count);
    const width = numbers.BYTES_PER_ELEMENT;
    const bytes = new Uint8Array(numbers.buffer);
    const planes = await inflated(text);
    for (let place = 0; place < width; place++)
        for (let i = 0; i < count; i++) bytes[i * width + place] = planes[place * count + i];
    if (isDelta) for (let i = 1; i < count; i++) numbers[i] += numbers[i - 1];
    return numbers;
}

async function columns(packed) {
    const found = {};
    for (const name of Object.keys(packed)) found[name] = await column(packed[name]);
    return found;
}

// The first place in sorted[from..to) whose number is above `value`.
function above(sorted, value, from, to) {
    while (from < to) {
        const middle = (from + to) >> 1;
        if (sorted[middle] <= value) from = middle + 1;
        else to = middle;
    }
    return from;
}

function time(us) {
    const size = Math.abs(us);
    if (size >= 1e6) return (us / 1e6).toFixed(size >= 1e8 ? 1 : 3) + " s";
    if (size >= 1e3) return (us / 1e3).toFixed(size >= 1e5 ? 1 : 2) + " ms";
    return us.toFixed(0) + " µs";
}

// 1, 2 or 5 times a power of ten.
function tick(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].find((times) => times * power >= least) * power;
}

// What is not stored because it follows from steps: how long each call took, and how long it was computed.
function complete(calls, steps) {
    const { began, rest, part, first_step, last_step } = calls;
    const before = new Float64Array(steps.took.length + 1); // what all steps before one took
    steps.took.forEach((took, place) => { before[place + 1] = before[place] + took; });
    calls.computed = new Float64Array(began.length);
    calls.took = new Float64Array(began.length);
    for (let place = 0; place < began.length; place++) {
        const to = part[place + 1];
        for (let index = part[place]; index < to; index++)
            calls.computed[place] += before[first_step[index] + last_step[index] + 1] - before[first_step[index]];
        const last = to > part[place] ? first_step[to - 1] + last_step[to - 1] : -1;
        const end = rest[place] + (last < 0 ? 0 : steps.began[last] + steps.took[last]);
        calls.took[place] = Math.max(0, end - began[place]);
    }
}

class Timeline {
    constructor(data, steps, arrivals, calls, rows) {
        Object.assign(this, { data, steps, arrivals, calls, rows });
        this.maxRows = steps.rows.reduce((most, each) => Math.max(most, each), 1);
        this.maxCalls = steps.calls.reduce((most, each) => Math.max(most, each), 1);
        let top = 0;
        this.lanes = data.lanes.map(([pid, uid, firstRow, numRows]) => {
            const rowHeight = numRows > 24 ? 6 : 13;
            const lane = { pid, uid, firstRow, numRows, rowHeight, top, height: TITLE + numRows * rowHeight + GAP };
            top += lane.height;
            return lane;
        });
        this.height = top;
        this.scrolled = 0;
        this.all();
    }

    all() {
        // Of what was before the recording just so much that it shows.
        const { end_us, recorded_us } = this.data;
        this.begin = Math.max(0, recorded_us - 0.03 * (end_us - recorded_us));
        this.span = Math.max(end_us - this.begin, MIN_SPAN);
    }

    resize(width, height) {
        this.width = width;
        this.bottom = height;
        this.keepInSight();
    }

    x(us) { return (us - this.begin) / this.span * this.width; }
    us(x) { return this.begin + x / this.width * this.span; }

    zoom(factor, x) {
        const fixed = this.us(x);
        const whole = Math.max(this.data.end_us, MIN_SPAN);
        this.span = Math.min(Math.max(this.span * factor, MIN_SPAN), whole);
        this.begin = fixed - x / this.width * this.span;
        this.keepInSight();
    }

    move(dx, dy) {
        this.begin -= dx / this.width * this.span;
        this.scrolled -= dy;
        this.keepInSight();
    }

    keepInSight() {
        this.begin = Math.max(0, Math.min(this.begin, this.data.end_us - this.span));
        this.scrolled = Math.max(0, Math.min(this.scrolled, this.height - (this.bottom - AXIS - STEPS)));
    }

    draw(pen, colours) {
        pen.fillStyle = colours.paper;
        pen.fillRect(0, 0, this.width, this.bottom);
        pen.font = "11px system-ui, sans-serif";
        pen.textBaseline = "middle";
        for (const lane of this.lanes) this.drawLane(pen, colours, lane);
        this.drawBefore(pen, colours);
        for (const lane of this.lanes) this.drawName(pen, colours, lane);
        this.drawPlace(pen, colours);
        pen.fillStyle = colours.paper;
        pen.fillRect(0, 0, this.width, AXIS + STEPS);
        this.drawAxis(pen, colours);
        this.drawSteps(pen, colours);
    }

    // Calls that were under way began before the recording: whether they were computed then is not known.
    drawBefore(pen, colours) {
        const width = Math.min(this.width, this.x(this.data.recorded_us));
        if (width < 1) return;
        pen.fillStyle = colours.paper;
        pen.globalAlpha = 0.75;
        pen.fillRect(0, AXIS + STEPS, width, this.bottom - AXIS - STEPS);
        pen.globalAlpha = 1;
        pen.fillStyle = colours.line;
        pen.fillRect(width - 1, AXIS + STEPS, 1, this.bottom - AXIS - STEPS);
    }

    // Which part of the programs is in sight, where not all of them are.
    drawPlace(pen, colours) {
        const room = this.bottom - AXIS - STEPS;
        if (this.height <= room) return;
        pen.fillStyle = colours.faint;
        pen.fillRect(this.width - 5, AXIS + STEPS + this.scrolled / this.height * room, 5, room * room / this.height);
    }

    drawAxis(pen, colours) {
        const apart = tick(this.span / this.width * 110);
        for (let us = Math.ceil(this.begin / apart) * apart; us <= this.begin + this.span; us += apart) {
            const x = Math.round(this.x(us));
            pen.fillStyle = colours.line;
            pen.fillRect(x, 0, 1, AXIS + STEPS);
            pen.fillStyle = colours.faint;
            pen.fillText(time(us), x + 3, AXIS / 2);
        }
        pen.fillStyle = colours.line;
        pen.fillRect(0, AXIS, this.width, 1);
        pen.fillRect(0, AXIS + STEPS - 1, this.width, 1);
    }

    // Places of steps that are in sight, at least in part.
    stepsInSight() {
        const { began } = this.steps;
        const first = Math.max(0, above(began, this.begin, 0, began.length) - 1);
        return [first, above(began, this.begin + this.span, first, began.length)];
    }

    drawSteps(pen, colours) {
        const { began, took, rows, prefill, calls } = this.steps;
        const [first, end] = this.stepsInSight();
        const room = STEPS - 14, floor = AXIS + STEPS - 1;
        const scale = room / Math.log2(1 + this.maxRows);
        const height = (count) => Math.log2(1 + count) * scale;
        pen.fillStyle = colours.faint;
        pen.fillText(`rows, to ${this.maxRows}; calls, to ${this.maxCalls} (logarithmic)`, 4, AXIS + 8);
        const before = this.x(this.data.recorded_us);
        if (before > 150) pen.fillText("before the recording", 4, floor - 8);
        // The largest step of each pixel stands for the others that are narrower than one.
        let pixel = -1, largest = -1;
        const bar = (place) => {
            const x = Math.max(0, this.x(began[place]));
            const width = Math.max(1, Math.min(this.width, this.x(began[place] + took[place])) - x);
            const full = height(rows[place]), share = full * prefill[place] / rows[place];
            pen.fillStyle = colours.decode;
            pen.fillRect(x, floor - full, width, full - share);
            pen.fillStyle = colours.prefill;
            pen.fillRect(x, floor - share, width, share);
            pen.fillStyle = colours.calls;
            pen.fillRect(x, floor - height(calls[place]) - 1, width, 1.5);
        };
        for (let place = first; place < end; place++) {
            if (this.x(began[place] + took[place]) < 0) continue;
            const at = Math.floor(this.x(began[place]));
            if (at !== pixel && largest >= 0) {
                bar(largest);
                largest = -1;
            }
            pixel = at;
            if (this.x(began[place] + took[place]) - this.x(began[place]) >= 1) bar(place);
            else if (largest < 0 || rows[place] > rows[largest]) largest = place;
        }
        if (largest >= 0) bar(largest);
    }

    laneTop(lane) { return AXIS + STEPS + lane.top - this.scrolled; }

    drawLane(pen, colours, lane) {
        const top = this.laneTop(lane);
        if (top > this.bottom || top + lane.height < AXIS + STEPS) return;
        pen.fillStyle = colours.lane;
        pen.fillRect(0, top, this.width, TITLE);
        for (let row = 0; row < lane.numRows; row++) {
            const y = top + TITLE + row * lane.rowHeight;
            if (y + lane.rowHeight >= AXIS + STEPS && y <= this.bottom)
                this.drawRow(pen, colours, lane.firstRow + row, y, lane.rowHeight - 1);
        }
    }

    drawName(pen, colours, lane) {
        const middle = this.laneTop(lane) + TITLE / 2;
        pen.fillStyle = colours.ink;
        if (middle > AXIS + STEPS && middle < this.bottom) pen.fillText(this.nameOf(lane), 4, middle);
    }

    nameOf(lane) {
        return lane.pid < 0 ? "programs of calls whose arrival is not in the trace" : `pid ${lane.pid}, uid ${lane.uid}`;
    }

    // Places of the calls of a row that are in sight.
    callsInSight(row) {
        const { began, took } = this.calls;
        const from = this.rows.first[row], to = this.rows.first[row + 1];
        let first = Math.max(from, above(began, this.begin, from, to) - 1);
        if (first < to && began[first] + took[first] < this.begin) first++;
        return [first, above(began, this.begin + this.span, first, to)];
    }

    drawRow(pen, colours, row, y, height) {
        const [first, end] = this.callsInSight(row);
        if (end - first > 2 * this.width) this.drawDense(pen, colours, first, end, y, height);
        else for (let place = first; place < end; place++) this.drawCall(pen, colours, place, y, height);
    }

    drawCall(pen, colours, place, y, height) {
        const { began, took, part, first_step, last_step, errno } = this.calls;
        const x = Math.max(0, this.x(began[place]));
        const end = Math.min(this.width, this.x(began[place] + took[place]));
        pen.fillStyle = errno[place] ? colours.failed : colours.waiting;
        pen.fillRect(x, y, Math.max(1, end - x), height);
        pen.fillStyle = colours.computing;
        const to = part[place + 1];
        let index = above(first_step, this.stepAt(this.begin), part[place], to);
        index = Math.max(part[place], index - 1);
        for (let drawn = -1; index < to; index++) {
            const from = this.x(this.steps.began[first_step[index]]);
            if (from > this.width) break;
            const last = first_step[index] + last_step[index];
            const until = this.x(this.steps.began[last] + this.steps.took[last]);
            if (until < 0 || until <= drawn) continue;
            const left = Math.max(from, drawn, 0);
            drawn = Math.max(left + 1, Math.min(until, this.width));
            pen.fillRect(left, y + (errno[place] ? 2 : 0), drawn - left, height - (errno[place] ? 4 : 0));
        }
    }

    stepAt(us) { return above(this.steps.began, us, 0, this.steps.began.length) - 1; }

    // Of each pixel the share that is computing stands at the bottom, what waits above it.
    drawDense(pen, colours, first, end, y, height) {
        const { began, took, computed, errno } = this.calls;
        const width = Math.ceil(this.width) + 1, pixels = this.width / this.span;
        const busy = new Float32Array(width), computing = new Float32Array(width), failed = new Uint8Array(width);
        for (let place = first; place < end; place++) {
            const from = (began[place] - this.begin) * pixels, size = took[place] * pixels;
            const share = took[place] ? Math.min(1, computed[place] / took[place]) : 0;
            const last = Math.min(width - 1, Math.floor(from + size));
            for (let pixel = Math.max(0, Math.floor(from)); pixel <= last; pixel++) {
                const part = Math.min(pixel + 1, from + size) - Math.max(pixel, from);
                busy[pixel] += part;
                computing[pixel] += part * share;
                failed[pixel] |= errno[place] ? 1 : 0;
            }
        }
        for (let pixel = 0; pixel < width; pixel++) {
            const full = Math.min(1, busy[pixel]) * height, share = Math.min(1, computing[pixel]) * height;
            if (!full) continue;
            pen.fillStyle = failed[pixel] ? colours.failed : colours.waiting;
            pen.fillRect(pixel, y + height - full, 1, full - share);
            pen.fillStyle = colours.computing;
            pen.fillRect(pixel, y + height - share, 1, share);
        }
    }

    // What is at a point, in words; nothing: "".
    tell(x, y) {
        const us = this.us(x);
        if (y < AXIS) return time(us);
        if (y < AXIS + STEPS) return this.tellStep(us);
        const lane = this.lanes.find((each) => y >= this.laneTop(each) && y < this.laneTop(each) + each.height);
        if (!lane) return "";
        const row = Math.floor((y - this.laneTop(lane) - TITLE) / lane.rowHeight);
        if (row < 0 || row >= lane.numRows) return this.nameOf(lane);
        return this.tellCall(lane, lane.firstRow + row, us, x);
    }

    tellStep(us) {
        const place = this.stepAt(us);
        const { began, took, predicted, rows, prefill, calls, entries } = this.steps;
        if (place < 0) return "";
        if (us > began[place] + took[place] && this.x(us) - this.x(began[place]) > 3)
            return `no step: ${time(us - began[place] - took[place])} since step ${place}`;
        const lines = [
            `step ${place}, at ${time(began[place])}`,
            `${time(took[place])}` + (Number.isNaN(predicted[place]) ? "" : `, predicted ${time(predicted[place])}`),
            `${rows[place]} rows, ${prefill[place]} of prefills`,
            `${calls[place]} calls; decodes read ${entries[place]} entries`,
        ];
        return lines.join("\n");
    }

    tellCall(lane, row, us, x) {
        const { arrival, number, began, took, over, errno, rows, steps, computed } = this.calls;
        const from = this.rows.first[row], to = this.rows.first[row + 1];
        const place = above(began, us, from, to) - 1;
        const isHit = (each) => each >= from && each < to && us <= began[each] + Math.max(took[each], (us - this.us(x - 2)));
        if (!isHit(place)) {
            const before = place >= from ? `${time(us - began[place] - took[place])} since call ${number[place]}` : "";
            return [this.nameOf(lane), before && `thinking: ${before}`].filter(Boolean).join("\n");
        }
        const known = arrival[place] - 1, about = this.arrivals;
        const lines = [`call ${number[place]} of ${this.nameOf(lane)}, at ${time(began[place])}`];
        if (known >= 0) {
            lines.push(`${this.data.kinds[about.kind[known]]}, file ${about.file[known]}: ${about.before[known]} entries, ` +
                `${about.tokens[known]} tokens given`);
            if (about.priority[known]) lines.push(`priority ${about.priority[known]}`);
            if (!Number.isNaN(about.deadline[known])) lines.push(`deadline at ${time(about.deadline[known])}`);
        }
        lines.push(`${time(took[place])}: waiting ${time(Math.max(0, took[place] - computed[place]))}, ` +
            `computing ${time(computed[place])}`);
        if (began[place] < this.data.recorded_us) lines.push("it was under way when the recording began");
        lines.push(`${rows[place]} rows in ${steps[place]} steps`);
        lines.push(!over[place] ? "not over when the trace ended" : errno[place] ? `failed: errno ${errno[place]}` : "answered");
        return lines.join("\n");
    }
}

function colours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["paper", "ink", "faint", "line", "lane", "waiting", "computing", "failed", "decode", "prefill", "calls"];
    return Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

function facts(data, timeline) {
    const header = data.header;
    const count = (size, what) => `${size.toLocaleString("en")} ${what}`;
    const parts = [header.model, header.backend, header.precision, header.processor].filter(Boolean);
    parts.push(time(data.end_us), count(timeline.steps.began.length, "steps"), count(timeline.calls.number.length, "calls"),
        count(data.lanes.length, "programs"));
    if (data.num_lost) parts.push(count(data.num_lost, "RECORDS LOST: the recording was not read fast enough"));
    if (data.is_torn) parts.push("THE FILE IS TORN: its end is missing");
    return parts.join(" · ");
}

function listen(timeline, canvas, tip, draw) {
    let dragged = null;
    const point = (event) => {
        const box = canvas.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("wheel", (event) => {
        event.preventDefault();
        const turned = event.deltaY || event.deltaX;
        if (event.shiftKey) timeline.move(0, -turned);
        else timeline.zoom(Math.exp(turned / 400), point(event)[0]);
        draw();
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
        dragged = point(event);
        canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => { dragged = null; });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    canvas.addEventListener("dblclick", () => { timeline.all(); draw(); });
    canvas.addEventListener("pointermove", (event) => {
        const [x, y] = point(event);
        if (dragged) {
            timeline.move(x - dragged[0], y - dragged[1]);
            dragged = [x, y];
            draw();
        }
        tip.textContent = timeline.tell(x, y);
        tip.hidden = !tip.textContent;
        tip.style.left = Math.min(event.clientX + 14, innerWidth - 380) + "px";
        tip.style.top = Math.min(event.clientY + 14, innerHeight - 130) + "px";
    });
    addEventListener("keydown", (event) => {
        const middle = timeline.width / 2;
        const action = {
            "+": () => timeline.zoom(0.7, middle), "=": () => timeline.zoom(0.7, middle),
            "-": () => timeline.zoom(1.4, middle), "0": () => timeline.all(),
            ArrowLeft: () => timeline.move(timeline.width / 8, 0), ArrowRight: () => timeline.move(-timeline.width / 8, 0),
            ArrowUp: () => timeline.move(0, 60), ArrowDown: () => timeline.move(0, -60),
        }[event.key];
        if (!action || event.ctrlKey || event.metaKey) return;
        event.preventDefault();
        action();
        draw();
    });
}

async function load() {
    const data = JSON.parse(document.getElementById("trace").textContent);
    const steps = await columns(data.steps), arrivals = await columns(data.arrivals);
    const calls = await columns(data.calls), rows = await columns(data.rows);
    complete(calls, steps);
    return new Timeline(data, steps, arrivals, calls, rows);
}

async function main() {
    const timeline = await load();
    const canvas = document.getElementById("view"), tip = document.getElementById("tip");
    document.getElementById("facts").textContent = facts(timeline.data, timeline);
    const pen = canvas.getContext("2d");
    let asked = false;
    const draw = () => {
        if (asked) return;
        asked = true;
        requestAnimationFrame(() => {
            asked = false;
            timeline.draw(pen, colours());
        });
    };
    const resize = () => {
        const { width, height } = canvas.getBoundingClientRect();
        const dots = devicePixelRatio || 1;
        canvas.width = Math.round(width * dots);
        canvas.height = Math.round(height * dots);
        pen.setTransform(dots, 0, 0, dots, 0, 0);
        timeline.resize(width, height);
        draw();
    };
    listen(timeline, canvas, tip, draw);
    addEventListener("resize", resize);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    resize();
}

main().catch((error) => {
    document.getElementById("facts").textContent = `The trace can't be shown: ${error}`;
    throw error;
});
