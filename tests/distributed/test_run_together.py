"""``torchrun ... -m hf_patrickstar run SCRIPT``: an untouched script in several processes."""

import os
import pathlib
import subprocess
import sys

from models import make_model
from unchanged_scripts import FILES

TESTS = pathlib.Path(__file__).parents[1]


def test_an_untouched_script_trains_in_two_processes(tmp_path):
    (tmp_path / "clm.py").write_text(FILES["clm.py"], encoding="utf-8")
    make_model("gpt2").save_pretrained(tmp_path / "model")
    search = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "hf_patrickstar", "run", str(tmp_path / "clm.py"), "--output_dir", str(tmp_path / "out")]
    command += ["--model_name_or_path", str(tmp_path / "model"), "--max_train_samples", "16", "--use_cpu"]
    command += ["--max_steps", "2", "--report_to", "none", "--disable_tqdm", "true", "--save_strategy", "no"]
    ran = subprocess.run(
        [*command, "--patrickstar"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.count("has chunks: True of 2") == 2
    assert ran.stderr.count("hf-patrickstar run: ") == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()
