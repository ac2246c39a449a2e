"""`python make.py FOLDER` writes the files of this folder with real Paddle, which no test needs."""

import json
import sys

import numpy as np
import paddle

out = sys.argv[1]
net = paddle.nn.Sequential(paddle.nn.Linear(4, 6), paddle.nn.BatchNorm1D(6), paddle.nn.ReLU(), paddle.nn.Linear(6, 3))
net.train()
x = paddle.to_tensor(np.arange(20, dtype="float32").reshape(5, 4) / 10 - 1)
opt = paddle.optimizer.Adam(parameters=net.parameters(), learning_rate=0.01)
for _ in range(3):
    loss = net(x).square().mean()
    loss.backward()
    opt.step()
    opt.clear_grad()
net.eval()
paddle.save(net.state_dict(), f"{out}/net.pdparams")
paddle.save(net.state_dict(), f"{out}/net_protocol2.pdparams", protocol=2)
paddle.save(opt.state_dict(), f"{out}/net.pdopt")
paddle.save(
    [paddle.to_tensor([1.5, 2.5]), {"a": paddle.to_tensor([3], dtype="int64"), "epoch": 7}], f"{out}/nested.pdparams"
)
paddle.save(paddle.ones([2, 2], dtype="bfloat16"), f"{out}/bfloat16.pdparams")
facts = {
    "paddle": paddle.__version__,
    "input": x.numpy().tolist(),
    "output": net(x).numpy().tolist(),
    "state": {key: value.numpy().tolist() for key, value in net.state_dict().items()},
}
with open(f"{out}/net.json", "w") as file:
    json.dump(facts, file)
