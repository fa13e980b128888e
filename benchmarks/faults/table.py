"""The tables of docs/ampere-multigpu/faults.md, made from the record."""

from benchmarks.faults.cases import ENGINE, FAULTS, PHASES
from benchmarks.record import FOLDER, read

RECORD = FOLDER / "pipeline-faults.json"


def conditions(record: dict) -> str:
    where = record["hardware"]
    commits: dict[str, list[str]] = {}
    for sample in record["samples"]:
        if sample["commit"] not in (known := commits.setdefault(sample["label"], [])):
            known.append(sample["commit"])
    measured = "; ".join(f"{label}: commit {', '.join(known)}" for label, known in commits.items())
    return f"Measured on {where['cpu']}, {where['cores']} cores shared with other work ({record['upstream']}; {measured}).\n"


def fault_table() -> str:
    record = read(RECORD)
    cases: dict[tuple, dict[str, dict]] = {}
    for sample in record["samples"]:
        if "fault" in sample:
            cases.setdefault((sample["fault"], sample["phase"], sample["stage"]), {})[sample["label"]] = sample
    head = (
        f"{conditions(record)}\n"
        "| fault | phase | of | client before | end before | client now | `/health` now | end now | left now |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    last = record["settings"]["stages"] - 1
    order = sorted(cases, key=lambda key: (FAULTS.index(key[0]), PHASES.index(key[1]), key[2]))
    return head + "".join(_row(key, cases[key], last) for key in order)


def _row(key: tuple, runs: dict[str, dict], last: int) -> str:
    fault, phase, stage = key
    before, now = runs.get("before"), runs.get("after")
    cells = [fault, phase, {last: "last stage", ENGINE: "engine"}.get(stage, "first stage")]
    cells += [_client(before), _end(before) + _extra(before)] if before else ["not measured"] * 2
    cells += [_client(now), _health(now), _end(now), _left(now)] if now else ["not measured"] * 4
    return "| " + " | ".join(cells) + " |\n"


def _client(run: dict) -> str:
    if run["client"] == "no request":
        return "–"
    if run["client_s"] is None:
        return f"nothing in {run['patience_s']:.0f} s"
    words = {"error": "error", "cut": "cut off", "http": "refused", "done": "answer"}
    return f"{words[run['client'].split(':')[0]]}, {run['client_s']:.1f} s"


def _health(run: dict) -> str:
    if run["phase"] in ("load", "warm-up"):
        return "not up yet"
    return f"{run['health']}, {run['health_s']:.1f} s" if run["health_s"] is not None else "200"


def _end(run: dict) -> str:
    return "none" if run["exit_s"] is None else f"status {run['exit_status']}, {run['exit_s']:.1f} s"


def _left(run: dict) -> str:
    if run["exit_s"] is None:
        return "all of it"
    parts = [
        f"{len(run['left_processes'])} processes" if run["left_processes"] else "",
        f"{len(run['left_shared_memory'])} names in /dev/shm" if run["left_shared_memory"] else "",
        "the port" if run["left_port"] else "",
    ]
    return ", ".join(part for part in parts if part) or "nothing"


def _extra(run: dict) -> str:
    left = _left(run)
    return "" if run["exit_s"] is None or left == "nothing" else f"; {left} left"


def limit_table() -> str:
    rows = [sample for sample in read(RECORD)["samples"] if "limit" in sample]
    return "| what | what happened |\n|---|---|\n" + "".join(f"| {_what(row)} | {_happened(row)} |\n" for row in rows)


def _what(row: dict) -> str:
    before = ", before" if row["label"] == "before" else ""
    return (f"{row['limit']} during {row['phase']}" if "phase" in row else row["limit"]) + before


def _happened(row: dict) -> str:
    if "held" in row:
        share = f"it held {row['held']:.1%} of the pool"
        return (
            f"{share}; all free after {row['freed_s']:.1f} s" if row["freed_s"] is not None else f"{share}; NOT freed"
        )
    if "ends" in row:
        words = {
            "done": "answered",
            "answering": "being answered meanwhile",
            "503": "refused with 503",
            "error": "an error inside the stream, after status 200",
        }
        ends = ", ".join(f"{count} {words.get(end, end)}" for end, count in row["ends"].items())
        told = f"; {row['with_retry_after']} were told when to try again" if "with_retry_after" in row else ""
        return f"of {row['sent']}: {ends}{told}"
    if "stopped_s" in row:
        return (
            f"for {row['stopped_s']:.0f} s: its client got {row['tokens']} of {row['tokens_asked']} tokens; of "
            f"{row['sent_meanwhile']} others {row['answered_meanwhile']} were answered meanwhile, "
            f"{row['answered_in_the_end']} in the end; then {'serves on' if row['answered_afterwards'] else 'DOES NOT SERVE'}"
        )
    if "gone_s" in row:
        end = {"cut": "cut off", "error": "an error"}.get(row["client"], row["client"])
        heard = f"{end}, {row['client_s']:.1f} s" if row["client_s"] is not None else f"{end} in 60 s"
        # The leader that was struck itself has the signal's status.
        status = "" if row["exit_status"] in (None, -9) else f", status {row['exit_status']}"
        gone = f"all gone after {row['gone_s']:.1f} s{status}" if row["gone_s"] is not None else "NOT gone after 60 s"
        return f"client: {heard}; {gone}; left: {_left(row | {'exit_s': 0})}"
    return row["answer"].replace("|", "/").replace("\n", " ")


#: the tables of docs/ampere-multigpu/faults.md, by the words of their markers
PAGE = {"fault table": fault_table, "limit table": limit_table}
