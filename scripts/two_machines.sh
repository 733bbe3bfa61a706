#!/usr/bin/env bash
# Fine-tunes on two machines that are two network namespaces of this one, joined by a cable (a veth pair), with one
# process each, and compares with two processes on one machine: the losses have to be the same, bit for bit.
#
#   bash scripts/two_machines.sh                                  with --patrickstar
#   bash scripts/two_machines.sh --bf16 --gradient_checkpointing  more options of the recipe
#   bash scripts/two_machines.sh --plain                          the stock Trainer (DDP)
#
# Needs Linux with ip, unshare and nsenter, and to be root or to be allowed user namespaces.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
steps=8

give_up() {
    echo "two_machines: $*" >&2
    exit 2
}

if [ -z "${TWO_MACHINES_INSIDE:-}" ]; then
    [ "${BASH_VERSINFO[0]}${BASH_VERSINFO[1]}" -ge 51 ] || give_up "bash $BASH_VERSION is too old; 5.1 is needed"
    for tool in unshare nsenter ip; do
        command -v "$tool" >/dev/null || give_up "there is no '$tool' here; on Linux it is in util-linux or iproute2"
    done
    # The first machine is a namespace too: it ends with this script, and nothing has to be undone.
    for how in "unshare --net" "unshare --user --map-root-user --net"; do
        if $how true 2>/dev/null; then
            TWO_MACHINES_INSIDE=1 exec $how bash "$PWD/scripts/two_machines.sh" "$@"
        fi
    done
    give_up "this system allows no network namespaces, neither as this user nor in a user namespace; run it as root"
fi

flags=(--patrickstar)
if [ "${1:-}" = --plain ]; then
    flags=()
    shift
fi
flags+=("$@")

folder=$(mktemp -d)
other=
machines=()
clean_up() {
    for process in "${machines[@]}" $other; do
        kill "$process" 2>/dev/null || true
    done
    wait
    rm -rf "$folder"
}
trap clean_up EXIT

echo "1. Laying a cable between two network namespaces ..."
ip link set lo up
unshare --net sleep infinity &
other=$!
for _ in $(seq 50); do
    [ "$(readlink "/proc/$other/ns/net")" = "$(readlink /proc/self/ns/net)" ] || break
    sleep 0.1
done
there=(nsenter --net="/proc/$other/ns/net")
ip link add cable type veth peer name cable netns "$other" ||
    give_up "the kernel makes no veth pair here; load it as root (modprobe veth) and try again"
ip address add 10.77.0.1/24 dev cable
ip link set cable up
"${there[@]}" ip address add 10.77.0.2/24 dev cable
"${there[@]}" ip link set cable up
"${there[@]}" ip link set lo up

echo "2. Building a corpus, a tokenizer and a checkpoint ..."
PYTHONPATH="scripts${PYTHONPATH:+:$PYTHONPATH}" "$python" - "$folder" 2>"$folder/log" <<'PYTHON' ||
import pathlib
import sys

import quickstart

quickstart.CORPUS_NBYTES = 200_000
folder = pathlib.Path(sys.argv[1])
quickstart.build_checkpoint(folder, quickstart.build_corpus(folder))
PYTHON
    { cat "$folder/log" >&2; give_up "the checkpoint could not be built; is '$python' the one of scripts/setup.sh?"; }

# NAME INTERFACE PREFIX... -- LAUNCH OPTIONS...: one launch of the recipe with a home and an output of its own. It takes
# the place of the shell that calls it, so that its process id is the launcher's.
recipe() {
    local name=$1 interface=$2 prefix=()
    shift 2
    while [ "$1" != -- ]; do
        prefix+=("$1")
        shift
    done
    shift
    mkdir -p "$folder/$name"
    exec "${prefix[@]}" env \
        HF_HUB_OFFLINE=1 HF_HOME="$folder/$name/home" TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES= \
        OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE GLOO_SOCKET_IFNAME="$interface" \
        PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" \
        "$python" -m accelerate.commands.launch "$@" recipes/finetune_clm.py \
        --model_name_or_path "$folder/pretrained" --train_file "$folder/corpus.txt" \
        --output_dir "$folder/$name/output" --do_train --block_size 128 --per_device_train_batch_size 2 \
        --max_steps "$steps" --learning_rate 5e-4 --lr_scheduler_type constant --logging_steps 1 --save_strategy no \
        --report_to none --disable_tqdm true --seed 42 --use_cpu "${flags[@]}" >"$folder/$name/log" 2>&1
}

# WHAT NAME...: ends the script with what these launches printed.
fail() {
    local name
    for name in "${@:2}"; do
        echo "--- $name" >&2
        # What the launcher adds about its processes does not say why they ended.
        sed '/torch\/distributed\/elastic/,$d' "$folder/$name/log" | tail -n 15 >&2
    done
    echo "two_machines: failed: $1; the end of what was printed is above" >&2
    exit 1
}

cable_nbytes() {
    awk '$1 == "cable:" { print $2 + $10 }' /proc/self/net/dev
}

echo "3. Fine-tuning on two machines: accelerate launch ... finetune_clm.py ${flags[*]-} ..."
before=$(cable_nbytes)
for rank in 0 1; do
    prefix=()
    [ "$rank" = 0 ] || prefix=("${there[@]}")
    recipe "machine_$rank" cable "${prefix[@]}" -- --config_file recipes/accelerate/multi_machine.yaml \
        --machine_rank "$rank" --main_process_ip 10.77.0.1 &
    machines+=($!)
done
# Whichever ends first tells: where one fails the other would wait for it.
while [ "${#machines[@]}" -gt 0 ]; do
    wait -n -p ended "${machines[@]}" || fail "training on two machines" machine_0 machine_1
    [ "$ended" = "${machines[0]}" ] && machines=("${machines[@]:1}") || machines=("${machines[0]}")
done
moved=$(($(cable_nbytes) - before))

echo "4. The same with two processes on one machine ..."
(recipe one_machine lo -- --config_file recipes/accelerate/cpu_2_processes.yaml) ||
    fail "training on one machine" one_machine

"$python" - "$folder" "$steps" "$moved" <<'PYTHON'
import json
import pathlib
import re
import sys

folder, steps, moved = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
printed = {
    name: re.findall(r"'loss': '?([-0-9.einfa]+)", (folder / name / "log").read_text())
    for name in ("machine_0", "machine_1", "one_machine")
}
exact, processes = {}, {}
for name in ("machine_0", "one_machine"):
    state = json.loads((folder / name / "output" / "trainer_state.json").read_text())
    exact[name] = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    results = json.loads((folder / name / "output" / "train_results.json").read_text())
    processes[name] = round(results["epoch"] * results["train_samples"] / (2 * steps))
print(f"{'step':>6}{'two machines':>16}{'one machine':>16}")
for step, pair in enumerate(zip(exact["machine_0"], exact["one_machine"], strict=True), 1):
    print(f"{step:>6}" + "".join(f"{loss:>16.6f}" for loss in pair))
print(f"through the cable: {moved / 2**20:.1f} MiB")
promises = {
    "both machines printed every loss": len(printed["machine_0"]) == len(printed["machine_1"]) == steps,
    "both machines printed the same losses": printed["machine_0"] == printed["machine_1"],
    "they are those of one machine": printed["machine_0"] == printed["one_machine"],
    "also those that are not rounded, bit for bit": exact["machine_0"] == exact["one_machine"],
    "the loss went down": exact["machine_0"][-1] < exact["machine_0"][0],
    "two processes trained, in both runs": set(processes.values()) == {2},
    "gradients went through the cable": moved > 2**20 * steps,
}
for promise, held in promises.items():
    print(f"  {'yes' if held else 'NO '} {promise}")
broken = [promise for promise, held in promises.items() if not held]
if broken:
    raise SystemExit("two_machines: failed: " + "; ".join(broken))
print("two_machines: ok")
PYTHON
