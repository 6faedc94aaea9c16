"""Lines that `symphony stat` and `symphony du` print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def human_bytes(size: float) -> str:
    """Format bytes as `ls -h` does: `1.5M`."""
    for unit in ("", "K", "M", "G"):
        if size < 1024:
            return f"{size:.0f}{unit}" if not unit or size >= 10 else f"{size:.1f}{unit}"
        size /= 1024
    return f"{size:.1f}T"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 name`, `2 names`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def human_uptime(seconds: float) -> str:
    """Format an uptime: `12 s`, `3:05`, `2:03:05`, `5 d 2:03:05`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if not days and not hours:
        return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{rest:02}"


def stat_lines(info: dict[str, Any]) -> list[str]:
    """Return the state of a daemon as lines of text."""
    page_bytes = info["page_bytes"]
    used = human_bytes((info["num_pages"] - info["num_free_pages"]) * page_bytes)
    total = human_bytes(info["num_pages"] * page_bytes)
    used_bytes = _of(info["used_bytes"], info["quota_bytes"], human_bytes)
    used_files = _of(info["used_files"], info["quota_files"], str)
    steps = max(info["num_steps"], 1)
    return [
        f"model    {info['model']}",
        f"weights  {_weights(info)}",
        f"daemon   pid {info['pid']}, up {info['uptime_s']:.0f} s, mount {info['mount']}, socket {info['socket']}",
        f"pool     {used} of {total} used, {counted(info['num_names'], 'name')}",
        f"memory   {memory_line(info['tiers'], page_bytes)}",
        f"tiers    {tiers_line(info['tiers'])}",
        f"yours    {used_bytes}, {used_files} {'file' if used_files == '1' else 'files'}",
        f"disk     {_disk_line(info['disk'])}",
        f"lips     {info['lips']} connected, {counted(info['waiting_calls'], 'call')} in flight",
        f"steps    {info['num_steps']}, {1000 * info['step_s'] / steps:.1f} ms each",
        f"tokens   {info['num_tokens']}, {info['num_prefill_tokens']} of them prefill",
        f"calls    {info['num_calls']} answered, {info['num_failed_calls']} failed",
        f"batches  at most {info['max_calls_in_step']} calls of {info['max_lips_in_step']} programs in one step",
        f"costs    {_costs(info['cost_model'])}",
        f"held     {_held(info['held'])}",
        *([f"fleet    {_fleet(info['fleet'])}"] if info.get("fleet") else []),  # an older daemon reports no fleet
        *(f"user     {user_line(each)}" for each in info.get("users", ())),  # an older daemon does not report users
    ]


def user_line(user: dict[str, Any]) -> str:
    """Return a line on a user: size of the files, memory in the daemon, and the kinds of objects in that memory."""
    memory = _of(user["memory_bytes"], user["quota_memory"], human_bytes)
    holds = ", ".join(f"{count:,} {kind}" for kind, count in user["holds"].items())
    return f"{user['uid']}: {human_bytes(user['used_bytes'])} of files, {memory} of memory ({holds or 'nothing'})"


def memory_line(tiers: dict[str, Any], page_bytes: int) -> str:
    """Return a line on memory: pages in use, pages on disk alone, and pinned pages."""
    used = human_bytes((tiers["num_frames"] - tiers["num_free_frames"]) * page_bytes)
    line = f"{used} of {human_bytes(tiers['num_frames'] * page_bytes)} in use"
    line += f"; {human_bytes(tiers['num_on_disk_alone'] * page_bytes)} on disk alone"
    return line + (f", {human_bytes(tiers['num_kept'] * page_bytes)} pinned" if tiers["num_kept"] else "")


def tiers_line(tiers: dict[str, Any]) -> str:
    """Return a line on the tiers: pages that moved, calls that wait for pages, and resumes that did not wait."""
    line = f"{tiers['policy']}; {tiers['num_in']:,} pages came in, {tiers['num_dropped']:,} went"
    if tiers["num_resumes"]:
        line += f"; {tiers['num_hidden']:,} of {tiers['num_resumes']:,} resumes hidden"
    if tiers["num_waits"]:
        mean_ms = 1000 * tiers["wait_s"] / tiers["num_waits"]
        line += f"; {tiers['num_waiting']:,} calls wait, {tiers['num_waits']:,} did for {mean_ms:.1f} ms each"
    if tiers["num_preempted"]:
        line += f"; {tiers['num_preempted']:,} preempted"
    return line + (f"; IT FAILS: {error}" if (error := tiers["error"] or tiers["policy_error"]) else "")


def _weights(info: dict[str, Any]) -> str:
    if info["weights"] != "loading":
        return f"{info['weights']} in {info['weights_s']:.1f} s"
    return f"loading ({100 * info['weights_share']:.0f} %, {info['weights_s']:.0f} s)"


def _fleet(fleet: dict[str, Any]) -> str:
    machines = counted(len(fleet["machines"]), "machine")
    return f"{fleet['name']}: {machines}, {fleet['trouble'] or 'etcd answers'}"


def _costs(kinds: dict[str, Any]) -> str:
    """Return a line on the errors of the cost model, which predicts the times of steps."""
    told = ", ".join(f"{100 * kind['median_error']:.0f} % ({name})" for name, kind in kinds.items())
    return f"steps take what was expected within {told}" if told else "no step was expected yet"


def _held(held: dict[str, Any]) -> str:
    """Return a line on how long single tasks held up the daemon's trio thread."""
    line = (
        f"longest {1000 * held['longest_s']:.1f} ms; "
        f"{held['num_long']:,} of {held['num']:,} times over {1000 * held['long_s']:g} ms"
    )
    for worst in held["worst"][:1]:
        line += f"; the longest was {1000 * worst['processor_s']:.1f} ms of processor, by {worst['task']}"
    return line


def _disk_line(disk: dict[str, Any]) -> str:
    """Return a line on the disk: the bytes in use, changes that are not written back yet, damage and errors."""
    line = _of(disk["disk_bytes"], disk["disk_limit_bytes"], human_bytes)
    if disk["num_unsynced_files"]:
        line += f"; {disk['num_unsynced_files']} changes not on it yet, {human_bytes(disk['unsynced_bytes'])} of pages"
    # A daemon of an earlier release reports neither damage nor files that lost entries.
    if num_lost := disk.get("num_lost_files"):
        line += f"; {counted(num_lost, 'file')} lost entries: symphony fsck"
    line += f"; DAMAGED: {disk['damage']}" if disk.get("damage") else ""
    return line + (f"; IT FAILS: {disk['error']}" if disk["error"] else "")


def _of(used: int, quota: int | None, shown: Callable[[int], str]) -> str:
    return shown(used) if quota is None else f"{shown(used)} of {shown(quota)}"


def disk_lines(usage: dict[str, Any], what: str = "PATH") -> list[str]:
    """Return lines with the bytes of files on disk. Shared pages count in each file's line, but once in the total.
    `what`: the heading of the names.
    """
    rows = [(row["path"], row) for row in usage["rows"]] + [("total", usage["total"])]
    return [f"{'ON DISK':>9} {'TOKENS':>8}  {what}"] + [
        f"{human_bytes(row['disk_bytes']):>9} {row['tokens']:>8}  {name}" for name, row in rows
    ]


def du_lines(usage: dict[str, Any], page_bytes: int, what: str = "PATH") -> list[str]:
    """Return lines with the bytes of paths. EXCLUSIVE: bytes that `rm` of a file frees; `-`: no permission to read.
    `what`: the heading of the names.
    """
    lines = [f"{'EXCLUSIVE':>9} {'SHARED':>7} {'TOKENS':>8}  {what}"]
    lines += [_du_line(row["path"], row, page_bytes) for row in usage["rows"]]
    lines.append(_du_line("total", usage["total"], page_bytes))
    return lines


def _du_line(name: str, row: dict[str, Any], page_bytes: int) -> str:
    exclusive = _du_bytes(row, "exclusive", page_bytes, row["plain_bytes"])
    return f"{exclusive:>9} {_du_bytes(row, 'shared', page_bytes):>7} {row['tokens']:>8}  {name}"


def _du_bytes(row: dict[str, Any], kind: str, page_bytes: int, more: int = 0) -> str:
    """Format the bytes of a row. `page_bytes`: page size of the served model.
    A daemon of an earlier release tells pages instead of bytes.
    """
    num_pages = row[f"{kind}_pages"]
    return "-" if num_pages is None else human_bytes(row.get(f"{kind}_bytes", num_pages * page_bytes) + more)
