"""A rank that starts ranks of its own, by spawn and by torchrun, and prints what they see of their job."""

import json
import subprocess
import sys

import dpfuse.job as distributed
from dpfuse.job import spawn
from tests.distributed.scripts.functions import endpoints

if __name__ == "__main__":
    if distributed.get_rank() == 1:
        context = spawn(endpoints, nprocs=1, start_method="fork")
        ask = "import json; from tests.distributed.scripts.functions import endpoints; print(json.dumps(endpoints()))"
        torchrun = ["torch.distributed.run", "--standalone", "--no-python", sys.executable, "-c", ask]
        said = subprocess.run([sys.executable, "-m", *torchrun], capture_output=True, text=True, check=True).stdout
        print(json.dumps([endpoints(), context.return_queues[0].get(), json.loads(said)]))
