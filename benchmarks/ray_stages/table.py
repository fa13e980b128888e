"""The tables of docs/ampere-multigpu/ray.md: faults from the record, the network's part computed."""

from benchmarks.ray_stages import network
from benchmarks.ray_stages.faults import CASES
from benchmarks.record import FOLDER, read

RECORD = FOLDER / "pipeline-ray.json"


def fault_table() -> str:
    record = read(RECORD)
    where = record["hardware"]
    runs: dict[str, dict[str, dict]] = {}
    for row in record["samples"]:
        runs.setdefault(row["case"], {})[row["label"]] = row
    commits = ", ".join(dict.fromkeys(row["commit"] for row in record["samples"] if row["label"] == "now"))
    head = (
        f"Measured on {where['cpu']}, {where['cores']} cores shared with other work ({record['upstream']}, commit "
        f"{commits}).\n\n"
        "| fault | client | `/health` | server ended | other stage gone | left |\n|---|---|---|---|---|---|\n"
    )
    return head + "".join(
        _row(name, row)
        for case in CASES
        for name, row in (
            (case.what, runs.get(case.name, {}).get("now")),
            (f"{case.what}: before [remote-queues](patches.md#remote-queues)", runs.get(case.name, {}).get("before")),
        )
        if row
    )


def _row(name: str, row: dict) -> str:
    none = f"nothing in {row['patience_s']:.0f} s"
    client = row["client"].split(":")[0]
    cells = [
        name,
        "–" if client == "no request" else none if row["client_s"] is None else f"{client}, {row['client_s']:.1f} s",
        "not up yet"
        if client == "no request"
        else none
        if row["health_s"] is None
        else f"{row['health']}, {row['health_s']:.1f} s",
        none if row["exit_s"] is None else f"status {row['exit_status']}, {row['exit_s']:.1f} s",
        none if row["other_stage_gone_s"] is None else f"{row['other_stage_gone_s']:.1f} s",
        _left(row),
    ]
    return "| " + " | ".join(cells) + " |\n"


def _left(row: dict) -> str:
    if row["exit_s"] is None:
        return "all of it"
    left = [*row["left_processes"], *row["left_shared_memory"]]
    return ", ".join(left) or "nothing"


#: the tables of the page, by the words of their markers
PAGE = {"fault table": fault_table, "link table": network.link_table, "decode table": network.decode_table}
