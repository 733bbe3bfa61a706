"""States on a drive: the ring beside ``dd`` on the same drive, and steps with 0, 30 and 100 % of the states there.

Rounds are interleaved. The ring reads and writes tiles of three fp32 lists, as an update does, with checksums; two
``dd`` read one file and write another at the same time, past the page cache, with requests of a tile's list. Then
engines train the same model in turns: losses must be the same bits. What the disk takes of a step is compared with what
a plan says by the rate that was measured before.

    python benchmarks/bench_disk.py [--folder DIR] [--rounds N] [--output results]
"""

import contextlib
import os
import statistics
import subprocess
import time

import common
import torch

from hf_patrickstar import PatrickStarEngine
from hf_patrickstar.counts import Counts
from hf_patrickstar.memory.disk import Disk, Tile
from hf_patrickstar.memory.tiers import Tier
from hf_patrickstar.schedule.script import TILE_NUMEL

REQUEST_NBYTES = 4 * TILE_NUMEL
NUM_TILES = 16
LISTS = ("master", "exp_avg", "exp_avg_sq")
SHARES = (0.0, 0.3, 1.0)
MODEL = {"num_layers": 8, "hidden": 768, "vocabulary": 8192, "positions": 128}
SETTINGS = {"device_budget": "1500MiB", "chunk_budget": "160MiB", "placement": "host", "activation_offload": False}


class RingRounds:
    """The ring over lists of its own."""

    def __init__(self, folder):
        self.counts = Counts()
        self._disk = Disk([folder], self.counts)
        regions = {name: (self._disk.allocate(NUM_TILES * TILE_NUMEL, torch.float32), 1) for name in LISTS}
        self._tiles = [Tile(regions, n * TILE_NUMEL, (n + 1) * TILE_NUMEL) for n in range(NUM_TILES)]
        ring = self._disk.ring
        ring.lend(torch.zeros(ring.nbytes_of(len(LISTS) * REQUEST_NBYTES), dtype=torch.uint8))
        for region, _ in regions.values():
            region.put_away()
        self.round(lambda lists: [part.uniform_() for part in lists.values()])

    def round(self, update=lambda lists: None):
        """Bytes per second, read and written."""
        begin = time.perf_counter()
        self._disk.ring.submit([(tile, update) for tile in self._tiles]).wait()
        return 2 * NUM_TILES * len(LISTS) * REQUEST_NBYTES / (time.perf_counter() - begin)

    def close(self):
        """Ends its threads."""
        self._disk.ring.close()


def dd_round(folder):
    """Bytes per second of two ``dd``, one of which reads while the other writes."""
    count = NUM_TILES * len(LISTS)
    source, target = os.path.join(folder, "dd-source"), os.path.join(folder, "dd-target")
    block = [f"bs={REQUEST_NBYTES}", f"count={count}", "status=none"]
    commands = [
        ["dd", f"if={source}", "of=/dev/null", "iflag=direct", *block],
        ["dd", "if=/dev/zero", f"of={target}", "oflag=direct", "conv=notrunc", *block],
    ]
    if not os.path.exists(source):
        for path in (source, target):
            with open(path, "wb") as file:
                for _ in range(count):
                    file.write(os.urandom(2**20) * (REQUEST_NBYTES // 2**20))
                os.fsync(file.fileno())
    begin = time.perf_counter()
    running = [subprocess.Popen(command) for command in commands]
    assert not any(process.wait() for process in running)
    return 2 * count * REQUEST_NBYTES / (time.perf_counter() - begin)


def measure_rates(folder, rounds):
    """The median rates of both, in bytes per second."""
    ring, rates = RingRounds(folder), {"ring": [], "dd": []}
    try:
        dd_round(folder)
        for number in range(rounds):
            for name in ("ring", "dd") if number % 2 else ("dd", "ring"):
                rates[name].append(ring.round() if name == "ring" else dd_round(folder))
    finally:
        ring.close()
        for name in ("dd-source", "dd-target"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))
    return {name: statistics.median(found) for name, found in rates.items()}


class Trained:
    """An engine whose states are on the disk to a share."""

    def __init__(self, host_nbytes, folder):
        self.model = common.make_gpt2(**MODEL)
        settings = {**SETTINGS, "disk_path": folder, "reuse_plan": False}
        if host_nbytes is not None:
            settings["host_budget"] = host_nbytes
        made = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.engine = PatrickStarEngine(self.model, settings, made, device="cpu")
        self.losses, self.seconds, self.disk = [], [], []

    def step(self, number):
        """One step, whose figures are kept."""
        batch = common.make_batch(number, 2, 128, MODEL["vocabulary"], torch.device("cpu"))
        counts = self.engine.counts
        begin, before = time.perf_counter(), (counts.disk_seconds, counts.disk_read_nbytes, counts.disk_written_nbytes)
        loss = self.model(**batch).loss
        loss.backward()
        self.engine.optimizer.clip_grad_norm_(None, 1.0)
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - begin)
        after = counts.disk_seconds, counts.disk_read_nbytes, counts.disk_written_nbytes
        self.disk.append([now - then for now, then in zip(after, before, strict=True)])
        self.losses.append(loss.item().hex())


def measure_steps(folder, rounds, rate):
    """The figures of steps with each share of the states on the disk."""
    with_room = Trained(None, folder)
    with_room.step(0)
    owners = with_room.engine.ledger.owners(Tier.HOST)
    whole, states = sum(owners.values()), sum(owners.get(name, 0) for name in LISTS)
    with_room.engine.detach()
    engines = {share: Trained(whole - int(share * 0.97 * states) + 2**20, folder) for share in SHARES}
    for number in range(rounds + 2):
        for trained in engines.values():
            trained.step(number)
    rows = []
    for share, trained in engines.items():
        engine = trained.engine
        assert trained.losses == engines[0.0].losses, "losses differ"
        assert engine.ledger.peak(Tier.HOST) <= engine.ledger.budget(Tier.HOST)
        disk_s, read, written = (statistics.median(values) for values in zip(*trained.disk[2:], strict=True))
        row = {
            "asked_share": share,
            "disk_nbytes": sum(engine.ledger.owners(Tier.DISK).values()),
            "states_nbytes": states,
            "step_s": statistics.median(trained.seconds[2:]),
            "disk_s": disk_s,
            "planned_disk_s": (read + written) / rate,
            "read_nbytes": read,
            "written_nbytes": written,
            "host_peak_nbytes": engine.ledger.peak(Tier.HOST),
            "host_budget_nbytes": engine.ledger.budget(Tier.HOST),
        }
        rows.append(row)
    for trained in engines.values():
        trained.engine.detach()
    return rows


def main():
    """Measures, prints and writes."""
    parser = common.parser(__doc__)
    parser.add_argument("--folder", default=".", help="on the drive (default: the current directory)")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rates = measure_rates(options.folder, options.rounds)
    print(
        {name: f"{rate / 1e9:.2f} GB/s" for name, rate in rates.items()}, f"ring / dd {rates['ring'] / rates['dd']:.2f}"
    )
    rows = measure_steps(options.folder, options.rounds, rates["ring"])
    for row in rows:
        part, ratio = row["disk_nbytes"] / row["states_nbytes"], row["disk_s"] / max(row["planned_disk_s"], 1e-9)
        print(
            f"{part:4.0%} on the disk: step {row['step_s']:.2f} s, disk {row['disk_s']:.2f} s "
            f"({ratio:.2f} of planned), {row['written_nbytes'] / 2**20:.0f} MiB written, host "
            f"{row['host_peak_nbytes'] / 2**20:.0f} of {row['host_budget_nbytes'] / 2**20:.0f} MiB"
        )
    common.finish("bench_disk", options, {"rates": rates, "ring_to_dd": rates["ring"] / rates["dd"], "steps": rows})


if __name__ == "__main__":
    main()
