"""Join the lines of the four programs into figures.json: GFLOP/s (int8: GOP/s) of one core."""

import json
from pathlib import Path

here = Path(__file__).parent
out = []
for program in ("peak", "tiles", "cold", "libraries"):
    shapes: dict[str, dict[str, list[float]]] = {}
    for line in (here / "build" / f"{program}.jsonl").read_text().splitlines():
        r = json.loads(line)
        values = [round(r["gflops"]), round(r["p25"]), round(r["p75"]), round(r["ratio_to_first"], 2)]
        shapes.setdefault(r["shape"], {})[r["variant"]] = values
    for shape, variants in shapes.items():
        out.append({"program": program, "shape": shape, "median_p25_p75_ratio_to_first": variants})
(here / "figures.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in out) + "\n]\n")
