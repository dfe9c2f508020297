"""The forward of a patched model, read down in the order in which a batch goes through it.

The first model that a batch reaches finds the boundaries (:func:`recognise`; ``find_documents.py`` decides whether the
batch is packed) and hands the :class:`PackedMask` to the models inside it (``attached.py``). The base model, which
loops over the layers, passes it in place of the attention mask. Each layer calls :meth:`PackedMask.attend` through its
seam (``seams/``), with the options of its call (``kernels/options.py``), and every layer that ran must have been given
the mask.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable

import torch

from .._torch import SDPA, compiling, constant, eager, is_no_verdict, numbered, unobserved
from .._types import Args, Call, Function, Model
from ..documents import given_boundaries
from ..documents.names import IGNORED_LABEL, LABELS, LENGTHS, PARENTS, REAL
from ..documents.tensors import described
from ..errors import BadBatch, NothingPacked, PackingNotIsolated
from . import attached, caches, heads, inspecting, labels, other_code, positions
from .calls import Calls, batch_shape, is_for_queries, passed
from .engines import row_part
from .facts import Role
from .find_documents import packed_mask_of
from .find_layers import Layer
from .find_models import models
from .packed_mask import MASK, PackedMask, mask_among
from .seams import document
from .step import MARK, PADDING, ROLE, Patched, Step
from .transformers_names import ENCODED

if TYPE_CHECKING:
    from .split.row_part import RowPart

# What a thread remembers of the forwards that it is in. It is compared with; boundaries never travel through it.


class _Thread(threading.local):
    times = 0  # how often a base model's patched forward was entered
    ran: set[int] | None = None  # the ids of the modules that have run, if that is recorded
    proves = False  # a proof runs the model, so that its batch is no user's

    def __init__(self) -> None:
        # (patch, position_ids, attention_mask) of each dense batch that is being computed, the outermost first
        self.inside: list[Any] = []
        # the patches of calls that a forward without argument names is computing
        self.unnamed: list[Patched] = []


thread = _Thread()


@contextlib.contextmanager
def proof() -> Iterator[None]:
    """Run models in order to prove something: inside, no batch is examined or cut into passes."""
    before, thread.proves = thread.proves, True
    try:
        yield
    finally:
        thread.proves = before


# 1. Our forward names the arguments of a call, and takes it through the steps


def entered(original: Function) -> Function:
    """Return the replacement for a model's ``forward``. It also accepts collator lengths that the original rejects."""
    calls = Calls(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The replacement is on the class. Instances without our mark run their original forward.
        patch = self.__dict__.get(MARK)
        if patch is None or caches.has_paged(kwargs):  # generate_batch packs prompts itself
            return original(self, *args, **kwargs)
        padding = self.__dict__.get(PADDING)
        if padding is None:
            return patched(self, args, kwargs)
        return padding.computed(patched, self, args, kwargs, calls.positional or ["input_ids"])

    def patched(self: Any, args: Args, kwargs: Call) -> Any:
        # torch's context_parallel puts another function here for every batch. A graph for each would be of no use, so
        # the model runs eagerly; layers that are compiled by themselves stay compiled.
        if torch.nn.functional.scaled_dot_product_attention is not SDPA and compiling():
            return outside_a_graph(self, args, kwargs)
        patch, role = self.__dict__[MARK], self.__dict__[ROLE]
        call = calls.named(args, kwargs)
        if call is None:
            return _without_names(patch, role, original, self, args, kwargs)
        tokens = call.get("input_ids")
        pooled = getattr(call.get("inputs_embeds") if tokens is None else tokens, attached.POOLED, None)
        if pooled is not None:  # a head has cut the batch down to the tokens that it pools: the whole one is computed
            if not role.innermost:  # a forward that a subclass of the head calls as super().forward
                return original(self, *args, **kwargs)
            pooled.delivered = True
            call = {**call, **pooled.content.whole}
        step = Step(self, patch, role, calls, args, call)
        if role.innermost and not step.captured:
            thread.times += 1
        recognise(step)
        if patch.budget is None:
            compute = prepare(step)
            output = compute(step, step.mask)
        else:
            output = patch.budget.computed(step)  # in passes (passes.py), each of which is prepared
        for trait, found in patch.after:
            output = trait.after(step, found, output)
        output = heads.after(step, output)
        output = output if step.weighted is None else labels.after(step, step.weighted, output)
        return output if pooled is None else pooled.content.pooled(output)

    @eager
    def outside_a_graph(self: Any, args: Args, kwargs: Call) -> Any:
        return patched(self, args, kwargs)

    other_code.ours(forward)
    if not calls.takes("position_ids"):  # OPT up to 4.45; Trainer drops columns that the signature lacks
        extra = inspect.Parameter("position_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
        inspecting.show_parameters(forward, [*inspecting.parameters(original), extra])
    return forward


def _without_names(patch: Patched, role: Role, original: Function, module: Any, args: Args, kwargs: Call) -> Any:
    # Other code put a forward of *args here. The forwards below it find what is packed.
    if role.innermost or compiling():
        cannot = "a graph cannot" if compiling() else "no forward below it can"
        raise PackingNotIsolated(
            f"{len(args)} arguments without names came to a forward that was replaced by one with *args, and which of "
            f"them are position_ids {cannot} find out. Call the model with keywords."
        )
    thread.unnamed.append(patch)
    try:
        return original(module, *args, **kwargs)
    finally:
        thread.unnamed.pop()


# 2. What the batch says of documents: an outer model has found it, or it is looked for


def recognise(step: Step) -> None:
    """Take the packed mask that an outer model has passed or attached, or make one of what the call says."""
    role, call = step.role, step.call
    given, carried = call.get(MASK), call.get(step.patch.facts.carrier)
    if isinstance(given, dict):
        step.mask = mask_among([*given.values(), carried])
    else:
        step.mask = given if isinstance(given, PackedMask) else carried if isinstance(carried, PackedMask) else None
    step.mask_received = step.mask is not None
    if not step.mask_received:
        tokens: Any = call.get("input_ids")
        tokens = call.get("inputs_embeds") if tokens is None else tokens
        # no tokens if there are none, or in one dimension (GPT-2)
        shape = (tokens.shape[0], tokens.shape[1]) if getattr(tokens, "ndim", 0) > 1 else (0, 0)
        piece = getattr(call.get("position_ids"), attached.MASK, None)  # what an outer model has attached
        if piece is not None and (piece.content is None or piece.content.shape == shape):
            piece.delivered = True
            step.mask = piece.content
        elif piece is not None or not role.innermost or not _was_found_dense(step):
            step.mask = _make_mask(step, shape, piece is None)
        if step.mask is not None and role.innermost and given is not None and is_for_queries(given):
            raise PackingNotIsolated(
                f"a model around this {type(step.module).__name__} made a mask for every query of a packed batch, and "
                "what it says beyond documents is not known. Please report the model; until then train it padded."
            )
        # Another model passes the mask itself where position_ids do not reach the base model.
        # Gemma 3: the causal LM makes masks for its inner model, which is passed the packed mask instead;
        # the **kwargs of Falcon's and Phi's token classifiers pass position_ids to no other module
        swallows = "position_ids" not in step.calls.names and not role.predicts_the_next
        stops = step.patch.facts.makes_masks or step.patch.facts.stops_ids or swallows or not step.calls.takes_ids
        passes = role.innermost or role.pools or not role.outermost or stops
        step.passes_mask = step.mask is not None and passes and not step.by_hook


def _make_mask(step: Step, shape: tuple[int, int], first: bool) -> PackedMask | None:
    # `first` says that no outer model has looked: then a packed batch may be refused if other code's forward led here.
    patch, around, innermost = step.patch, step.role.outermost, step.role.innermost
    # Padding that a collator of fa2patch has made is a document. `real_tokens` mark it, [batch, length] with 0 in the
    # padding, and become the mask that router losses weigh tokens by.
    real = step.call.pop(REAL, None)
    # If this process holds a part of every row, the boundaries are those of the whole rows.
    part = row_part(step.module, step.call) if (around or innermost) and not step.by_hook else None
    if around:
        step.call = given_boundaries.translated(step.call, step.calls.names, shape)
        ids = step.call.get("position_ids")
        if isinstance(ids, torch.Tensor) and ids.dim() == 1 and len(ids) == shape[1]:
            step.call["position_ids"] = ids[None]  # [1, length], as models make them: many index ids by the row
    call = step.call
    given = call.get(MASK)
    made_inside = innermost and any([ids is None and mask is given for ids, mask in found_around(step)])
    training = step.module.training and torch.is_grad_enabled()
    one_per_token = step.role.predicts_the_next or innermost
    # DistilBERT takes no position_ids up to 4.57 and raises for them. So its row is packed, also one of a single
    # document, as an epoch's last batch may be. A call with a cache cannot be packed: upstream raises its own error.
    always = not step.calls.takes_ids and call.get("position_ids") is not None and not caches.held(call)
    for_proof = {**call}  # a proof runs it again, and position ids that are made below may seem to restart
    made = packed_mask_of(call, patch, made_inside, training, part, may_be_packed=one_per_token, always=always)
    if real is not None:
        real = _real_of(real, shape, None if made is None else made.part)
    if made is not None:
        if made.part is not None:
            _keep_masks(step)  # an engine's own attention must not run
        if first and not step.by_hook:
            _refuse_unprepared(step, for_proof)
        if real is not None:
            given = call.get(MASK)  # zeros and ones, as packed_mask_of leaves it
            real = real if given is None else given * real.to(given)
            made.real = for_proof[REAL] = real
        patch.examine(step.module, for_proof, made)
        call.pop(PARENTS, None)  # it means nothing to upstream's **kwargs
        if real is not None and step.calls.takes(MASK):
            call[MASK] = real
    elif around and not caches.held(call):
        given_boundaries.refuse_unread(call, step.calls.names, shape, training)
    return made


def _real_of(real: Any, shape: tuple[int, int], part: RowPart | None) -> torch.Tensor:
    # Trainer's context parallelism splits what it knows, and leaves these whole.
    if part is not None and isinstance(real, torch.Tensor) and real.shape == part.rows(shape):
        return part.own(real)
    if not (isinstance(real, torch.Tensor) and real.shape == shape):
        raise BadBatch(
            f"{REAL}: expected a tensor {list(shape)}, 0 in the padding and 1 elsewhere, found {described(real)}. Pass "
            "it as the collator made it, or leave it out if the row has no padding."
        )
    return real


def _refuse_unprepared(step: Step, call: Call) -> None:
    # A forward of other code on the outermost model may have led here past what prepares its labels.
    patch, outermost = step.patch, step.role.outermost
    around = step.module if outermost else patch.model
    led_here = not other_code.on_top(around) or (not step.captured and patch in thread.unnamed)
    # The labels around a padded batch that is computed packed are padded, and none of them crosses documents.
    if led_here and outermost != step.role.innermost and not thread.proves:
        padded = getattr(call.get("position_ids"), attached.PADDING, None) is not None
        if not (padded or (outermost and passed(call, LABELS))):
            other_code.refuse_bypassed(patch.model, around.forward, call)


def _was_found_dense(step: Step) -> bool:
    # An outer model may also have made a mask for every query, or one for each kind of layer.
    ids, mask, around = step.call.get("position_ids"), step.call.get("attention_mask"), found_around(step)
    if step.captured:
        return is_for_queries(mask)
    for its_ids, its_mask in around:
        if its_ids is ids and its_mask is mask:
            return True
    return bool(around) and (isinstance(mask, dict) or is_for_queries(mask))  # flash's are [batch, length]: Gemma 3


def found_around(step: Step) -> list[tuple[Any, Any]]:
    # (position_ids, attention_mask) of each dense batch that an outer model of this patch is computing
    if step.captured or not thread.inside:
        return []
    return [(ids, mask) for patch, ids, mask in thread.inside if patch is step.patch]


# 3. Labels, heads, positions and traits change the call


def prepare(step: Step) -> Callable[[Step, Any], Any]:
    """Check or change the call before a forward, and return what computes it from the step and its mask."""
    labels.before(step)
    heads.before(step)
    positions.before(step)
    if step.mask is not None and step.call.get(ENCODED) is not None:
        from . import cross  # which only decoders behind an encoder need

        cross.before(step)
    # training needs no cache, and no decoding step could tell its documents apart;
    # a model around the innermost one may not take use_cache (Qwen3.5 in 5.10)
    packed = (step.passes_mask or step.mask_received) and not step.patch.facts.keeps_cache
    if packed and ("use_cache" in step.calls.names or "use_cache" in step.call):
        step.call["use_cache"] = False
    for trait, found in step.patch.before:
        trait.before(step, found)
    if step.mask is None:
        return _call_dense
    if step.mask_received and not step.role.outermost:
        return _call_with_mask
    # the outermost model of a stack receives it of the encoder-decoder around it
    return _call_with_mask_checked if step.passes_mask or step.mask_received else _call_with_mask_attached


# 4. A dense batch is computed as without fa2patch


def _call_dense(step: Step, mask: None = None) -> Any:
    if step.captured:
        if _says_nothing(step):
            _warn_of_graph(step.patch.number)
        if isinstance(step.call.get("position_ids"), torch.Tensor) and not step.role.innermost:
            step.call["position_ids"] = attached.attach(step.call["position_ids"], attached.Piece(attached.MASK, None))
        return step.calls.make(step.module, step.args, step.call)
    before = thread.times
    step.patch.computes_packed = False
    if not found_around(step):
        _count_unpacked(step)
    # Inner models compare what they are given with this, and so know that the batch was found dense.
    thread.inside.append((step.patch, step.call.get("position_ids"), step.call.get("attention_mask")))
    try:
        output = step.calls.make(step.module, step.args, step.call)
    finally:
        thread.inside.pop()
    if not step.role.innermost and thread.times == before and _runs_eagerly(step.module):
        raise PackingNotIsolated(
            "a batch did not come through the base model's patched forward: somebody has replaced it after "
            "fa2patch.apply. See fa2patch.status(model); apply fa2patch last."
        )
    return output


def _runs_eagerly(model: Model) -> bool:
    # A base model that is compiled by itself counts no entries.
    own = ("forward", "_orig_mod", "_compiled_call_impl")
    return not any(vars(base).get(name) or base._modules.get(name) for base in models(model)[1:] for name in own)


# 5. A packed mask takes the place of attention_mask, or is sent to the model inside


def _call_with_mask_checked(step: Step, mask: PackedMask) -> Any:
    # Not every layer runs in each forward (layerdrop). Hooks tell which blocks ran, and hooks everywhere would take
    # time in every model. So they are used only once a forward has missed a layer; that forward is repeated with hooks.
    step.patch.unpacked = None
    step.call[step.patch.facts.carrier] = mask
    if not step.calls.takes_ids:
        step.call.pop("position_ids", None)
    if step.captured or not step.patch.skips:
        ids = None if step.captured or (step.patch.vouched and not step.patch.changes_ids) else _Kept(step)
        output = _call_explained(step, mask)
        if ids is not None:
            step.patch.changes_ids = ids.have_changed
        if not _misses(step, mask, None):
            return output
        if step.captured:
            _refuse_missed(step, mask, None)
        mask.calls.clear()
        del output
        if ids is not None and ids.have_changed:
            ids.put_back()
        if _keep_masks(step):
            return _call_with_mask_checked(step, mask)
        step.patch.skips = True
    ran: set[int] = set()
    with contextlib.ExitStack() as stack:
        for module in {module for layer in step.patch.attention for module in _inside_block(step, layer)}:
            stack.callback(module.register_forward_pre_hook(record_run).remove)
        stack.callback(setattr, thread, "ran", thread.ran)
        thread.ran = ran
        output = _call_explained(step, mask)
    if _misses(step, mask, ran):
        _refuse_missed(step, mask, ran)
    return output


class _Kept:
    """The position ids of a call that may be repeated: XGLM up to 4.49 adds to them in place."""

    def __init__(self, step: Step) -> None:
        ids = step.call.get("position_ids")
        self.ids = ids if isinstance(ids, torch.Tensor) and not ids.is_inference() else None  # these count no changes
        if self.ids is not None:
            with unobserved():
                self.given, self.version = self.ids.clone(), self.ids._version

    @property
    def have_changed(self) -> bool:
        return self.ids is not None and self.ids._version != self.version

    def put_back(self) -> None:
        if self.ids is not None:
            self.ids.copy_(self.given)


def _keep_masks(step: Step) -> bool:
    from . import dropped_masks  # which few need

    decoder = models(step.module)[-1]
    return dropped_masks.keep(decoder.get_submodule(layer.name) for layer in step.patch.attention)


def _call_explained(step: Step, mask: PackedMask) -> Any:
    try:
        output = _call_with_mask(step, mask)
    except TypeError as error:
        if PackedMask.__name__ not in str(error):
            raise
        raise PackingNotIsolated(
            f"{type(step.module).__name__} used the mask of a packed batch in a way that fa2patch does not know, or a "
            f"layer of it is not patched any more ({error}). See fa2patch.status(model).layers; please report it."
        ) from error
    except Exception as error:
        if step.role.pools and not is_no_verdict(error):  # upstream may fail where the attached batch was lost
            _require_delivered(step)
            heads.refuse_failed_hooks(step.module, models(step.module)[-1], error)
        raise
    if step.pieces:
        _require_delivered(step)
    return output


def _call_with_mask(step: Step, mask: PackedMask) -> Any:
    if step.mask_received and step.call.get("position_ids") is None and "position_ids" in step.calls.names:
        step.call["position_ids"] = mask.position_ids
    if step.role.innermost:  # its layers read the mask, and Cohere's in 4.47 raise where lengths are handed on
        for name in LENGTHS:
            step.call.pop(name, None)
        if step.patch.facts.by_document:
            return document.computed(step, mask)
        if step.patch.facts.counting:
            from .seams.counting import StackOfRow  # which BART's kin needs

            stack = StackOfRow(step.module, mask, step.patch.facts.counting)
            output = step.calls.make(stack, step.args, step.call)
            stack.require_counted()
            return output
    return step.calls.make(step.module, step.args, step.call)


def _call_with_mask_attached(step: Step, mask: PackedMask) -> Any:
    step.attach("position_ids", attached.Piece(attached.MASK, mask))
    for name in step.role.rejected:  # **kwargs of a subclass may hand them to a super().forward that takes none
        step.call.pop(name, None)
    output = step.calls.make(step.module, step.args, step.call)
    _require_delivered(step)
    return output


def _require_delivered(step: Step) -> None:
    for piece in step.pieces:
        if piece.delivered:
            continue
        gone = next((inner for inner in models(step.module) if MARK not in vars(inner)), None)
        if gone is not None:
            raise PackingNotIsolated(
                f"{type(step.module).__name__} is patched, but the {type(gone).__name__} inside it is not any more: it "
                "was reverted through a model that shares it, such as copy.copy(model). Call fa2patch.apply(model) "
                "again."
            )
        attached.require_delivered(piece, step.module)


# 6. The layers that ran must have been given it


def record_run(module: Any, args: Any) -> None:
    if thread.ran is not None:
        thread.ran.add(id(module))


def _inside_block(step: Step, layer: Layer) -> list[torch.nn.Module]:
    # If a module inside a layer's block runs, the block is not skipped. The layer alone does not show it, because other
    # code may compute a block's attention past its layer.
    block: torch.nn.Module = models(step.module)[-1].get_submodule(_block_of(layer))
    return [module for module in list(block.modules())[1:] if not inspecting.is_scripted(module)]


def _block_of(layer: Layer) -> str:
    parts = layer.name.split(".")
    return ".".join(parts[: next((at for at, part in enumerate(parts, 1) if part.isdigit()), len(parts))])


def _misses(step: Step, mask: PackedMask, ran: set[int] | None) -> bool:
    # Eagerly, the layers themselves are compared until a packed batch has reached them all. Later forwards, and graphs,
    # compare only the number of layers.
    patch = step.patch
    every = ran is None and mask.shape[1] > 1 and not patch.facts.crosses
    layers = patch.attention if every else _needing(step, mask, ran)
    missed = len(mask.calls) < len(layers)
    if not step.captured:
        known = None not in mask.calls  # 4.47's and 4.48's GPT-NeoX does not pass the layer to its function
        missed = missed or (known and not patch.vouched and bool(_not_given(layers, mask, step.module)))
        patch.vouched = not missed and ran is None and mask.shape[1] > 1
    return missed


def _needing(step: Step, mask: PackedMask, ran: set[int] | None) -> tuple[Layer, ...]:
    layers = step.patch.attention
    if tuple(mask.shape) == (1, 1):  # one document of one token sees itself and its source: LED passes no mask then
        return ()
    if mask.shape[1] == 1:  # mixers need none then, and LFM2 of 5.10 passes none
        layers = tuple(layer for layer in layers if layer.seam != "mixer")
    if step.patch.facts.crosses and step.call.get(ENCODED) is None:
        layers = tuple(layer for layer in layers if not _crosses_only(step, layer, mask))
    if ran is None:
        return layers
    return tuple(layer for layer in layers if any(id(module) in ran for module in _inside_block(step, layer)))


def _crosses_only(step: Step, layer: Layer, mask: PackedMask) -> bool:
    # Without an encoder's states, one attention layer of a block that could attend to them is enough.
    block = _block_of(layer)
    beside = [other for other in step.patch.attention if other is not layer and _block_of(other) == block]
    missed = {name.split(" ")[0] for name in _not_given((layer, *beside), mask, step.module)}
    return layer.name in missed and any(other.name not in missed for other in beside)


def _refuse_missed(step: Step, mask: PackedMask, ran: set[int] | None) -> None:
    layers = _needing(step, mask, ran)
    names = _not_given(layers, mask, step.module)
    why = "Their attention was replaced after fa2patch.apply: apply fa2patch last."
    if ran is None:
        why = (
            "Either their attention was replaced after fa2patch.apply: apply fa2patch last. Or the model has skipped "
            "them (layerdrop), which a compiled graph cannot tell: switch that off, or do not compile."
        )
    raise PackingNotIsolated(
        f"of {len(layers)} attention layers only {len(layers) - len(names)} were given the "
        f"boundaries of this packed batch; not {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. {why} See "
        "fa2patch.status(model).layers."
    )


def _not_given(layers: Sequence[Layer], mask: PackedMask, model: Model) -> list[str]:
    given = {id(module) for module in mask.calls}
    decoder = models(model)[-1]  # of the model that was called: a DataParallel replica carries the original's patch
    modules = [(layer.name, decoder.get_submodule(layer.name)) for layer in layers]
    return [f"{name} ({type(module).__name__})" for name, module in modules if id(module) not in given]


# 7. A dense training batch that may be documents joined by something else is worth a warning


SAY_AFTER = 16  # training batches without document information, then a warning


def _count_unpacked(step: Step) -> None:
    # Joined rows without document information look the same as plain ones, so a warning is given once.
    patch = step.patch
    if not (step.module.training and torch.is_grad_enabled()):
        return
    if not _says_nothing(step):
        _notice_overwritten(step)
    elif patch.unpacked is not None:
        patch.unpacked += 1
        if patch.unpacked == SAY_AFTER:
            warn_unpacked(patch, f"{SAY_AFTER} training batches have come and none said")


def _says_nothing(step: Step) -> bool:
    training = step.module.training and torch.is_grad_enabled()
    return training and not passed(step.call, ("position_ids", *LENGTHS))


def _notice_overwritten(step: Step) -> None:
    # Something may have written an arange over the ids of a packed row. Two signs: its labels start several times, or
    # earlier batches came with lengths. Reading labels waits for the device, so it is done in a few rows only.
    patch, call, given = step.patch, step.call, [*passed(step.call, LABELS).values()]
    stated = passed(call, LENGTHS) or is_for_queries(call.get(MASK))
    if not patch.may_be_overwritten or patch.facts.padded or stated or caches.held(call):
        return
    (rows, _), _ = batch_shape(call)
    if rows > 1:
        return
    if patch.stated:
        _warn_overwritten(patch, "earlier batches came with their documents' lengths and this one has none")
    elif patch.unpacked is not None and given and given[0].shape[:1] == (1,) and given[0].dim() == 2:
        patch.may_be_overwritten -= 1
        learned = given[0][0] != IGNORED_LABEL
        if bool(learned[:1].sum() + (learned[1:] & ~learned[:-1]).sum() > 1):
            _warn_overwritten(patch, "its labels start several times, as those of several documents do")


@constant
def _warn_of_graph(number: str) -> bool:
    # A graph cannot count batches: a count that it reads would make a new graph for every batch. So the warning comes
    # with the first graph for training batches without document information. A constant of a graph needs a value, so
    # False is returned.
    patch: Patched = numbered(number)
    if patch.unpacked is not None:
        warn_unpacked(patch, "a graph was compiled for training batches that do not say")
    return False


def _warn_overwritten(patch: Patched, seen: str) -> None:
    patch.may_be_overwritten = 0
    warnings.warn(
        f"the position_ids of a training row count on from its first token to its last, and {seen}. If documents were "
        "joined in this row and something has written an arange over their ids, they attend to each other. Pass "
        "position_ids that restart in each document, or cu_seq_lens_q; if the row is one document, nothing is wrong.",
        NothingPacked,
        stacklevel=2,
    )


def warn_unpacked(patch: Patched, seen: str) -> None:
    # `seen` is the beginning of the text.
    patch.unpacked = None
    warnings.warn(
        f"fa2patch.apply(model) is on, but {seen} where documents "
        "start (position_ids, cu_seq_lens_*, seq_idx). If examples were joined in these rows (TRL up to 0.19 does "
        "so: packing=True, and padding_free=True without flash attention), they attend to each other. Collate with "
        "fa2patch.DataCollatorWithFlattening; fa2patch.verify(model, batch=batch) says what a batch holds. If they are "
        "padded batches, their padding is computed; fa2patch.apply(model, padded_batches=True) leaves it out.",
        NothingPacked,
        stacklevel=2,
    )
