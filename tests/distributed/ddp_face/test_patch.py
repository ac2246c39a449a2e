"""dpfuse.patch(): every way to torch's class leads to ours while it acts, and torch works as before around it."""

from __future__ import annotations

import copy
import inspect
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as ImportedBefore

import dpfuse
from dpfuse.integrations.wrapping import TrainerWrapping
from tests.distributed.ddp_face.test_training_steps import Normed, assert_equal_models, batch, built
from tests.distributed.ddp_face.test_with_other_tools import Deep

INIT = ImportedBefore.__init__
SIGNATURE = inspect.signature(ImportedBefore)


class Derived(ImportedBefore):
    """What a user made of torch's class."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return super().forward(*inputs, **kwargs) * 2


@pytest.fixture
def single_rank(group):
    """A job of one rank in this process, and torch's class left as it was found."""
    yield
    assert ImportedBefore.__init__ is INIT


def made_by(make: Any) -> type:
    return type(make(nn.Linear(2, 2)))


pytestmark = pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")


@pytest.mark.usefixtures("single_rank")
def test_every_name_of_torchs_class_makes_ours_until_it_is_undone():
    with dpfuse.patch():
        from torch.nn.parallel import DistributedDataParallel as ImportedInside

        for make in (
            ImportedBefore,
            ImportedInside,
            torch.nn.parallel.DistributedDataParallel,
            torch.nn.parallel.distributed.DistributedDataParallel,
        ):
            assert made_by(make) is dpfuse.DistributedDataParallel
    for make in (ImportedBefore, ImportedInside, torch.nn.parallel.DistributedDataParallel):
        assert made_by(make) is ImportedBefore


@pytest.mark.usefixtures("single_rank")
def test_it_acts_at_once_nests_and_ends_with_the_last_one():
    first = dpfuse.patch()
    second = dpfuse.patch()
    first.undo()
    first.undo()
    assert made_by(ImportedBefore) is dpfuse.DistributedDataParallel
    with pytest.raises(ZeroDivisionError), second:
        with dpfuse.patch():
            pass
        assert made_by(ImportedBefore) is dpfuse.DistributedDataParallel
        _ = 1 / 0
    assert made_by(ImportedBefore) is ImportedBefore
    with second:
        assert made_by(ImportedBefore) is dpfuse.DistributedDataParallel
    assert made_by(ImportedBefore) is ImportedBefore


@pytest.mark.usefixtures("single_rank")
def test_isinstance_is_true_for_both_kinds_and_false_for_others():
    theirs = ImportedBefore(nn.Linear(2, 2))
    with dpfuse.patch():
        ours = ImportedBefore(nn.Linear(2, 2))
        for model in (ours, theirs):
            assert isinstance(model, ImportedBefore)
            assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
        assert not isinstance(ours.module, ImportedBefore)
        assert not isinstance(theirs, dpfuse.DistributedDataParallel)
    assert isinstance(ours, ImportedBefore)


@pytest.mark.usefixtures("single_rank")
def test_arguments_errors_and_the_signature_are_torchs():
    with dpfuse.patch():
        assert inspect.signature(ImportedBefore) == SIGNATURE
        model = ImportedBefore(nn.Linear(2, 2), None, bucket_cap_mb=3, gradient_as_bucket_view=True)
        assert (model.bucket_bytes_cap, model.gradient_as_bucket_view) == (3 << 20, True)
        with pytest.raises(RuntimeError, match="not needed when a module doesn't have any parameter"):
            ImportedBefore(nn.ReLU())
        with pytest.raises(TypeError, match="no_such_argument"):
            ImportedBefore(nn.Linear(2, 2), no_such_argument=1)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'module'"):
            ImportedBefore()


def test_without_a_process_group_it_is_torchs_error():
    with dpfuse.patch(), pytest.raises(ValueError, match="Default process group has not been initialized"):
        ImportedBefore(nn.Linear(2, 2))


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_who_wraps_the_constructor_too_keeps_the_wrapping(when, monkeypatch):
    made = []

    def wrap() -> Any:
        inner = ImportedBefore.__init__

        def noted(self: Any, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            inner(self, *args, **kwargs)

        monkeypatch.setattr(ImportedBefore, "__init__", noted)
        return noted

    noted = wrap() if when == "before" else None
    patched = dpfuse.patch()
    noted = noted or wrap()
    for _ in range(2):
        assert made_by(ImportedBefore) is dpfuse.DistributedDataParallel
        made.clear()
        patched.undo()
        assert ImportedBefore.__init__ is noted
        assert made_by(ImportedBefore) is ImportedBefore
        assert len(made) == 1
        patched = dpfuse.patch()
    patched.undo()
    monkeypatch.undo()
    with dpfuse.patch():
        assert made_by(ImportedBefore) is dpfuse.DistributedDataParallel


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_old_derived_copied_and_loaded_wrappers_train_as_before(rank, size):
    """One step of each wrapper: made before, made while patched, derived, copied, read from a file."""
    before = ImportedBefore(built(Normed, rank))
    expected = ImportedBefore(built(Normed, rank))
    expected(batch(rank, 0)).sum().backward()
    with dpfuse.patch():
        models = {"patched": ImportedBefore(built(Normed, rank)), "made before": before}
        models |= {f"{name}, copied": copy.deepcopy(model) for name, model in models.items()}
        models |= {f"{name}, loaded": saved_and_loaded(models[name]) for name in ("patched", "made before")}
        for name, model in models.items():
            kind = dpfuse.DistributedDataParallel if "patched" in name else ImportedBefore
            assert type(model) is kind, name
            model(batch(rank, 0)).sum().backward()
            assert_equal_models(model, expected, name, sent="patched" in name)
        with pytest.warns(UserWarning, match=r"Derived derives from torch's .*patch\(\) is active"):
            derived = Derived(built(Normed, rank))
        assert type(derived) is Derived
        derived(batch(rank, 0)).sum().backward()
        for param, other in zip(derived.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(param.grad, 2 * other.grad)
        assert get_model_state_dict(models["patched"]).keys() == get_model_state_dict(expected).keys()


def derived(name: str, base: type = ImportedBefore, **methods: Any) -> Any:
    return type(name, (base,), {"__module__": __name__, **methods})


@pytest.mark.usefixtures("single_rank")
def test_a_subclass_of_torchs_class_is_named_once_at_the_users_line():
    first = derived("First")
    with dpfuse.patch():
        second = derived("Second")
        for kind in (first, second):
            with pytest.warns(UserWarning, match="derives from torch's") as caught:
                assert [type(kind(nn.Linear(2, 2))) for _ in range(2)] == [kind, kind]
            (told,) = caught
            assert told.filename == __file__
            for part in (
                f"{kind.__name__} derives from torch's DistributedDataParallel",
                "torch averages the gradients of this model",
                f"Derive {kind.__name__} from dpfuse.DistributedDataParallel, or",
            ):
                assert part in str(told.message)
        with dpfuse.patch():  # another patch has nothing new to say; a class of the class has
            made_by(first)
            with pytest.warns(UserWarning, match="Third derives from"):
                made_by(derived("Third", second))


@pytest.mark.usefixtures("single_rank")
def test_other_wrappers_are_not_warned_of():
    def skips(self: Any, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    kinds = [derived("Ours", dpfuse.DistributedDataParallel), derived("Skips", __init__=skips), ImportedBefore]
    never = derived("Never")
    made_by(never)  # before a patch
    with dpfuse.patch():  # warnings are errors in tests
        for kind in kinds:
            made_by(kind)
        made_by(dpfuse.DistributedDataParallel)
        made_by(dpfuse.DataParallel)
    made_by(never)  # after it
    assert made_by(kinds[0]) is kinds[0]


@pytest.mark.usefixtures("single_rank")
def test_a_warning_that_is_an_error_ends_each_construction():
    kind = derived("Strict", __init__=lambda self, module: ImportedBefore.__init__(self, module))
    with dpfuse.patch(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(UserWarning, match="Strict derives from"):
                kind(nn.Linear(2, 2))
    assert made_by(kind) is kind


@pytest.mark.usefixtures("single_rank")
def test_a_strategy_of_lightning_that_makes_a_subclass_is_told():
    class Strategy:
        kind: type = ImportedBefore

        def configure_ddp(self) -> None:
            self.model = self.kind(nn.Linear(2, 2))

    class OurStrategy(TrainerWrapping, Strategy):
        pass

    strategy = OurStrategy()
    strategy.configure_ddp()
    assert type(strategy.model) is dpfuse.DistributedDataParallel
    strategy.kind = derived("OfStrategy")
    with pytest.warns(UserWarning, match="OfStrategy derives from"):
        strategy.configure_ddp()


def test_torchs_replicate_goes_on_with_torchs_class(rank, size):
    gradients = []
    for patched in (False, True):
        module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        torch.manual_seed(0)
        for param in module.parameters():
            nn.init.normal_(param)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if patched:
                with dpfuse.patch():
                    replicate(module)
                    module(torch.full((2, 4), rank + 1.0)).sum().backward()
            else:
                replicate(module)
                module(torch.full((2, 4), rank + 1.0)).sum().backward()
        assert not [each for each in told if "dpfuse" in str(each.message)]
        gradients.append([param.grad for param in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning:torch")
def test_the_compiler_splits_both_kinds_at_bucket_borders_while_patched(rank, size):
    def wrapped() -> nn.Module:
        torch.manual_seed(0)
        deep = Deep(nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)]))
        return torch.nn.parallel.DistributedDataParallel(deep, bucket_cap_mb=2)

    def run(model: nn.Module) -> tuple[int, list[Tensor]]:
        graphs = []

        def backend(graph: Any, example: Any) -> Any:
            graphs.append(graph)
            return graph

        torch._dynamo.reset()
        call = torch.compile(model, backend=backend)
        gradients = []
        for step in range(2):
            model.zero_grad()
            call(torch.full((2, 512), rank + step + 1.0)).sum().backward()
            gradients += [param.grad.clone() for param in model.parameters()]
        return len(graphs), gradients

    expected_graphs, expected = run(wrapped())
    assert expected_graphs > 2
    theirs = wrapped()
    with dpfuse.patch():
        ours = wrapped()
        assert type(ours) is dpfuse.DistributedDataParallel
        for model in (ours, theirs):
            graphs, gradients = run(model)
            assert graphs == expected_graphs
            assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
        assert ImportedBefore._get_active_ddp_module() is None


def test_options_of_a_patch_are_those_of_each_wrapper(rank, size):
    with dpfuse.patch(metrics=True, stall_timeout=30.0) as outer, dpfuse.patch(stall_timeout=40.0):
        both = ImportedBefore(nn.Linear(2, 2))
        own = ImportedBefore(nn.Linear(2, 2), stall_timeout=50.0)
    outer.undo()
    assert both._options.common["metrics"] is True
    assert [each._options.common["stall_timeout"] for each in (both, own)] == [40.0, 50.0]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'metric'; did you mean metrics"):
        dpfuse.patch(metric=True)
    assert type(ImportedBefore(nn.Linear(2, 2))) is ImportedBefore
