"""Published scaling tables, as data: what was trained where, and the throughput by ranks. Computes nothing."""

from __future__ import annotations

from typing import NamedTuple

from dpfuse.tune import INSIDE, NETWORKS, Cluster

__all__ = ["DLPERF", "SERIES", "SOURCES", "UNUSED", "Series"]


class Series(NamedTuple):
    """One column of a published table.

    Args:
        table: a key of `SOURCES`.
        name: of the column.
        model: one of `bench.published_models.MODELS`.
        batch: samples of one rank in a step.
        rows: ranks and samples per second of all ranks together. The first row is the base of the prediction.
        cluster: the GPUs and their network.
        buckets: how the software cuts the gradients; a key of `bench.published_scaling.BUCKETS`.
        algorithms: of the all-reduce; of several the faster.
        wire: dtype that travels.
    """

    table: str
    name: str
    model: str
    batch: int
    rows: tuple[tuple[int, float], ...]
    cluster: Cluster
    buckets: str
    algorithms: tuple[str, ...] = ("ring",)
    wire: str = "float32"


NCCL_24 = ("ring", "tree")  # NCCL has had trees since 2.4

TF_DGX1, TF_GCE, TF_EC2, TF_EC2_FAR = "TF DGX-1", "TF GCE K80", "TF EC2 K80", "TF EC2 K80, several servers"
HOROVOD_16, HOROVOD_64, HOROVOD_512 = "Horovod 16 GPUs", "Horovod 64 GPUs", "Horovod 512 GPUs"
TORCH, BERT, BERT_FAR, DLPERF = "torch DDP", "NVIDIA BERT", "NVIDIA BERT, several servers", "DLPerf"
GOYAL = "Goyal 2017"

SOURCES: dict[str, str] = {
    TF_DGX1: (
        "tensorflow/tensorflow, tensorflow/docs_src/performance/benchmarks.md: synthetic data; 8 P100 with NVLink. "
        "VGG16 and AlexNet all-reduce with NCCL; the others use a parameter server on the CPU, which we treat as a ring"
    ),
    TF_GCE: "the same page, Google Compute Engine, 8 K80 (PCIe 3), parameter server on the CPU, treated as a ring",
    TF_EC2: "the same page, Amazon p2.8xlarge, 8 K80 (PCIe 3); parameter server or copies, treated as a ring",
    TF_EC2_FAR: (
        "the same page, several p2.8xlarge with parameter servers on the same servers, treated as a ring; 10 Gb/s is "
        "Amazon's figure for the p2.8xlarge, not re-read"
    ),
    HOROVOD_16: (
        "uber/horovod, README.md of autumn 2017: 4 servers with 4 Pascal GPUs, 25 Gb/s, RDMA or TCP, NCCL; PCIe "
        "servers (issue 979)"
    ),
    HOROVOD_64: "the same README.md: 16 servers with 4 Pascal GPUs, plain 40 Gb/s, TCP, NCCL",
    HOROVOD_512: (
        "horovod/horovod, docs/benchmarks.rst (512 GPUs) and an earlier README.md (128 GPUs): only efficiencies (90 %, "
        "90 %; VGG-16 79 % and 68 %), 25 Gb/s RoCE; one GPU as in the table of 16 GPUs"
    ),
    TORCH: (
        "pytorch/pytorch, benchmarks/distributed/ddp/README.md: p50 seconds per step, DDP of torch 1.4, DGX-1 (V100), "
        "4 x 100 Gb/s InfiniBand; base: one GPU with DDP"
    ),
    BERT: (
        "NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT/README.md (19.07): BERT-large pre-training, one "
        "server; buckets of apex with 250 million elements (run_pretraining.py)"
    ),
    BERT_FAR: (
        "the same README.md, several servers, float16; base: one server. 4 cards (DGX-1) and 8 cards (DGX-2H) of 100 "
        "Gb/s: NVIDIA's data sheets, not re-read"
    ),
    DLPERF: (
        "Oneflow-Inc/DLPerf, README.md files of each case and reports/dlperf_benchmark_test_report_v1.md: 4 servers "
        "with 8 V100 and one 100 Gb/s InfiniBand card"
    ),
    GOYAL: (
        "arXiv 1706.02677, abstract: 90 % efficiency from 8 to 256 GPUs, one hour with batches of 8192. The step at "
        "256 GPUs is 3600 s / 14,075 steps; 50 Gb/s, halving and doubling between servers: from the paper, not re-read"
    ),
}

UNUSED = (
    "Li and others, VLDB 2020 (torch DDP): only figures; the abstract says near-linear up to 256 GPUs",
    "BytePS, docs/performance.md: only ratios to Horovod",
    "MXNet, example/image-classification/README.md: the stored version has no scaling table",
    "Megatron-LM: its tables join data with model parallelism",
    "Horovod, issues 416 and 779: users' reports; the batch size or the bytes that travel are not given",
)

_DGX1_P100 = Cluster(INSIDE["nvlink-1"], NETWORKS["infiniband-edr"])
_K80 = Cluster(INSIDE["pcie-3"], NETWORKS["ethernet-10"])
_DGX1 = Cluster(INSIDE["nvlink-2"], NETWORKS["infiniband-edr"])
_DGX2 = Cluster(INSIDE["nvlink-2"], NETWORKS["infiniband-edr"], ranks_per_node=16, cards=8)
_ONE_CARD = Cluster(INSIDE["nvlink-2"], NETWORKS["infiniband-edr"], cards=1)
_BIG_BASIN = Cluster(INSIDE["nvlink-1"], NETWORKS["roce-50"])


def _pascal(network: str) -> Cluster:
    return Cluster(INSIDE["pcie-3"], NETWORKS[network], ranks_per_node=4)


def _totals(ranks: tuple[int, ...], *rates: float) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ranks, rates, strict=True))


def _from_seconds(batch: int, ranks: tuple[int, ...], *seconds: float) -> tuple[tuple[int, float], ...]:
    return tuple((count, count * batch / time) for count, time in zip(ranks, seconds, strict=True))


def _tensorflow(table: str, cluster: Cluster, columns: dict[str, tuple[float, ...]]) -> list[Series]:
    ranks = (1, 8, 16, 32, 64) if table == TF_EC2_FAR else (1, 2, 4, 8)
    batches = {"alexnet": 512, **({"resnet152": 32, "vgg16": 32} if cluster is _K80 else {})}
    return [
        Series(table, model, model, batches.get(model, 64), _totals(ranks, *rates), cluster, "each gradient")
        for model, rates in columns.items()
    ]


def _bert(table: str, name: str, batch: int, wire: str, cluster: Cluster, rows: dict[int, float]) -> Series:
    return Series(table, name, "bert_large", batch, tuple(rows.items()), cluster, "apex, 250 M", NCCL_24, wire)


def _dlperf(name: str, model: str, batch: int, buckets: str, rates: tuple[float, ...], wire: str = "float32") -> Series:
    ranks = (1, 4, 8, 16, 32) if len(rates) == 5 else (1, 8, 16, 32)
    return Series(DLPERF, name, model, batch, _totals(ranks, *rates), _ONE_CARD, buckets, NCCL_24, wire)


def _horovod_16(name: str, network: str, rates: dict[str, tuple[float, float]]) -> list[Series]:
    return [
        Series(HOROVOD_16, f"{model}, {name}", model, 64, _totals((1, 16), *both), _pascal(network), "Horovod, 64 MB")
        for model, both in rates.items()
    ]


_TORCH_RANKS = (1, 2, 4, 8, 16)

SERIES: tuple[Series, ...] = (
    *_tensorflow(TF_DGX1, _DGX1_P100, {
        "inception_v3": (142, 284, 569, 1131),
        "resnet50": (219, 422, 852, 1734),
        "resnet152": (91.8, 181, 356, 716),
        "alexnet": (2987, 5658, 10509, 17822),
        "vgg16": (154, 295, 584, 1081),
    }),
    *_tensorflow(TF_GCE, _K80, {
        "inception_v3": (30.5, 57.8, 116, 227),
        "resnet50": (51.9, 99.0, 195, 387),
        "resnet152": (20.0, 38.2, 75.8, 148),
        "alexnet": (656, 1209, 2328, 4640),
        "vgg16": (35.4, 64.8, 120, 234),
    }),
    *_tensorflow(TF_EC2, _K80, {
        "inception_v3": (30.8, 58.7, 117, 230),
        "resnet50": (51.5, 98.0, 195, 384),
        "resnet152": (19.7, 37.6, 74.9, 149),
        "alexnet": (684, 1244, 2479, 4853),
        "vgg16": (36.3, 69.4, 141, 260),
    }),
    *_tensorflow(TF_EC2_FAR, _K80, {
        "inception_v3": (29.7, 229, 459, 902, 1783),
        "resnet50": (52.4, 378, 751, 1388, 2744),
        "resnet152": (19.4, 146, 291, 565, 981),
    }),
    *_horovod_16("RDMA", "roce-25", {
        "inception_v3": (134.4, 2022.6), "resnet101": (119.4, 1746.2), "vgg16": (130.9, 1787.4),
    }),
    *_horovod_16("TCP", "ethernet-25", {
        "inception_v3": (134.4, 1990.7), "resnet101": (119.4, 1685.1), "vgg16": (130.9, 1308.7),
    }),
    *[
        Series(
            HOROVOD_64, f"{model}, TCP", model, 64,
            _totals((1, 64), *rates), _pascal("ethernet-40"), "Horovod, 64 MB",
        )
        for model, rates in {
            "inception_v3": (148.8, 7932.1), "resnet101": (136.0, 7741.6), "vgg16": (149.6, 6084.2),
        }.items()
    ],
    *[
        Series(
            HOROVOD_512, model, model, 64,
            _totals((1, 128, 512), one, 128 * one * at_128, 512 * one * at_512), _pascal("roce-25"), "Horovod, 64 MB",
        )
        for model, one, at_128, at_512 in (
            ("inception_v3", 134.4, 0.90, 0.90), ("resnet101", 119.4, 0.90, 0.90), ("vgg16", 130.9, 0.79, 0.68),
        )
    ],
    *[
        Series(TORCH, model, model, 32, _from_seconds(32, _TORCH_RANKS, *seconds), _DGX1, "torch DDP", NCCL_24)
        for model, seconds in {
            "resnet50": (0.100, 0.103, 0.103, 0.104, 0.104),
            "resnet101": (0.171, 0.176, 0.176, 0.179, 0.179),
            "resnext50_32x4d": (0.147, 0.153, 0.153, 0.157, 0.157),
            "resnext101_32x8d": (0.425, 0.438, 0.439, 0.447, 0.450),
        }.items()
    ],
    _bert(BERT, "DGX-1 16G, 128 tokens", 8, "float32", _DGX1, {1: 33.36, 4: 121.92, 8: 245.12}),
    _bert(BERT, "DGX-1 16G, 128 tokens, float16", 16, "float16", _DGX1, {1: 125.44, 4: 458.24, 8: 919.04}),
    _bert(BERT, "DGX-1 16G, 512 tokens", 2, "float32", _DGX1, {1: 7.56, 4: 28, 8: 56.16}),
    _bert(BERT, "DGX-1 16G, 512 tokens, float16", 4, "float16", _DGX1, {1: 26.64, 4: 98.24, 8: 194.56}),
    _bert(BERT, "DGX-1 32G, 128 tokens", 32, "float32", _DGX1, {1: 40.32, 4: 154.88, 8: 309.76}),
    _bert(BERT, "DGX-1 32G, 128 tokens, float16", 64, "float16", _DGX1, {1: 171.52, 4: 655.36, 8: 1305.6}),
    _bert(BERT, "DGX-1 32G, 512 tokens", 4, "float32", _DGX1, {1: 8.36, 4: 31.52, 8: 62.72}),
    _bert(BERT, "DGX-1 32G, 512 tokens, float16", 8, "float16", _DGX1, {1: 30.08, 4: 116.80, 8: 231.68}),
    _bert(BERT, "DGX-2, 128 tokens", 32, "float32", _DGX2, {1: 43.52, 4: 168.96, 8: 335.36, 16: 665.6}),
    _bert(BERT, "DGX-2, 128 tokens, float16", 64, "float16", _DGX2, {1: 181.76, 4: 704, 8: 1402.88, 16: 2775.04}),
    _bert(BERT, "DGX-2, 512 tokens", 4, "float32", _DGX2, {1: 9.0, 4: 34.4, 8: 68.16, 16: 135.68}),
    _bert(BERT, "DGX-2, 512 tokens, float16", 8, "float16", _DGX2, {1: 32.32, 4: 124.16, 8: 247.04, 16: 488.96}),
    _bert(BERT_FAR, "DGX-1, 128 tokens", 16, "float16", _DGX1, {8: 874.24, 32: 3089.76, 128: 12144.64}),
    _bert(BERT_FAR, "DGX-1, 512 tokens", 4, "float16", _DGX1, {8: 195.93, 32: 700.16, 128: 2746.368}),
    _bert(BERT_FAR, "DGX-2H, 128 tokens", 64, "float16", _DGX2, {
        16: 3379.2, 64: 12709.88, 256: 51937.28, 1024: 188088.32,
    }),
    _bert(BERT_FAR, "DGX-2H, 512 tokens", 8, "float16", _DGX2, {16: 625.66, 64: 2386.38, 256: 9932.8, 1024: 37478.4}),
    _dlperf("ResNet-50, torch DDP", "resnet50", 128, "torch DDP", (350.66, 1306.49, 2707.42, 5193.09, 10032.72)),
    _dlperf("ResNet-50, apex", "resnet50", 128, "apex, 10 M", (367.29, 1449.48, 2887.65, 5716.79, 10917.09)),
    _dlperf("ResNet-50, apex, AMP", "resnet50", 256, "apex, 10 M", (802.9, 3137.44, 6154.66, 11991.94, 22551.16)),
    _dlperf("ResNet-50, TF 1 and Horovod", "resnet50", 128, "Horovod, 64 MB", (362.44, 2721.98, 5099.42, 9514.64)),
    _dlperf("ResNet-50, MXNet and Horovod", "resnet50", 96, "Horovod, 64 MB", (389.71, 2947.72, 5684.68, 10419.21)),
    _dlperf("BERT-base, apex, b32", "bert_base", 32, "apex, 250 M", (119.6, 457.72, 921.32, 1499.4, 2885.81)),
    _dlperf("BERT-base, apex, b48", "bert_base", 48, "apex, 250 M", (121.94, 464.66, 928.01, 1584.32, 3039.3)),
    _dlperf("BERT-base, apex, float16, b64", "bert_base", 64, "apex, 250 M",
            (444.51, 1671.66, 3251.7, 4936.92, 9331.72), "float16"),
    _dlperf("BERT-base, apex, float16, b96", "bert_base", 96, "apex, 250 M",
            (462.35, 1727.93, 3287.12, 5426.07, 10349.12), "float16"),
    _dlperf("BERT-base, TF 1 and Horovod, b32", "bert_base", 32, "Horovod, 64 MB", (106.80, 806.56, 1090.20, 1923.68)),
    _dlperf("BERT-base, MXNet and Horovod, b32", "bert_base", 32, "Horovod, 64 MB", (127.05, 928.03, 1136.44, 1895.50)),
    Series(GOYAL, "resnet50", "resnet50", 32, _from_seconds(32, (8, 256), 0.9 * 3600 / 14075, 3600 / 14075),
           _BIG_BASIN, "each gradient", ("two-level",)),
)  # fmt: skip
