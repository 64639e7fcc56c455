"""The hooks of a monitor: on the modules that a model has now, and on all optimizers."""

from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .compiled.calls import CompiledCalls
from .errors import warn_user
from .frame_log import FrameLog
from .gradients import GradientWatch
from .hooks import OptimizerHook, RootEntryHook, RootHook
from .modules import ModuleTree
from .names import named_modules

__all__ = ["Attachment"]


class Attachment:
    """Tells a log of calls which modules there are, and has their calls recorded while it is attached.

    Args:
        modules: those of the model that are watched.
        log: records the calls of all but the root.
        before_root, after_root: called around each forward of the root, the latter also when that has raised.
        after_module: called where the log has something to look at.
        before_step, after_step: called with each optimizer that takes a step, as long as their object is there.
        compiled: sees those that are compiled.
        gradients: sees the modules' calls, too, if there is one.
    """

    def __init__(
        self,
        modules: ModuleTree,
        log: FrameLog,
        *,
        before_root: Callable[[tuple[object, ...], Mapping[str, object]], None],
        after_root: Callable[[nn.Module, object, Mapping[str, object], object], None],
        after_module: Callable[[], None],
        before_step: Callable[[Optimizer], None],
        after_step: Callable[[Optimizer], None] | None,
        compiled: CompiledCalls,
        gradients: GradientWatch | None = None,
    ) -> None:
        self._modules = modules
        self._log = log
        self._before_root = before_root
        self._after_root = after_root
        self._after_module = after_module
        self._before_step = before_step
        self._after_step = after_step
        self._compiled = compiled
        self._gradients = gradients
        self._handles: list[RemovableHandle] = []
        self._handles_of: dict[int, list[RemovableHandle]] = {}

    @property
    def is_attached(self) -> bool:
        return bool(self._handles)

    def attach(self) -> None:
        """Does nothing if it is attached.

        Warns of modules that take no hooks, and watches the others. Raises TypeError where the root takes none; none is
        left then.
        """
        if self._handles:
            return
        self._follow()
        root = self._modules.root
        try:
            self._attach_to_root(root)
            names = {module: name for name, module in named_modules(root)}
            self._attach_to_all([(number, names[module], module) for module, number in self._modules.numbers.items()])
            self._handles.append(register_optimizer_step_pre_hook(OptimizerHook(self._before_step)))
            if self._after_step is not None:
                self._handles.append(register_optimizer_step_post_hook(OptimizerHook(self._after_step)))
        except Exception:
            self.detach()
            raise
        self._compiled.attached()
        if self._gradients is not None:
            self._gradients.is_on = True

    def detach(self) -> None:
        for handle in (*self._handles, *(handle for handles in self._handles_of.values() for handle in handles)):
            handle.remove()
        self._handles.clear()
        self._handles_of.clear()
        self._compiled.detach()
        if self._gradients is not None:
            self._gradients.is_on = False

    def follow_changes(self) -> None:
        """Watch modules that have come into the model since, and leave those that have left it."""
        if self._handles and self._modules.has_changed():
            self._follow()

    def _follow(self) -> None:
        added, dropped = self._modules.update()
        for number in dropped:
            self._log.drop_module(number)
            self._compiled.drop(number)
            for handle in self._handles_of.pop(number, ()):
                handle.remove()
        for number, name, module in added:
            self._log.add_module(number, name, module)
            if self._gradients is not None:
                self._gradients.add_module(number, name, module)
        if self._handles:  # or else they are attached with all others
            self._attach_to_all(added)
        for number, children in self._modules.children():
            self._log.set_children(number, children)

    def _attach_to_root(self, root: nn.Module) -> None:
        try:
            entry = RootEntryHook(root, self._before_root)
            self._handles.append(root.register_forward_pre_hook(entry, prepend=True, with_kwargs=True))
            self._attach_gradients(0, root)  # before the root's hook, which ends the batch
            # Also called when its forward raises: that batch has ended too.
            hook = RootHook(root, self._after_root)
            self._handles_of[0].append(root.register_forward_hook(hook, with_kwargs=True, always_call=True))
        except Exception as error:
            raise TypeError(
                f"model is a {type(root).__name__} that takes no hooks, and cannot be watched: {error}; watch the "
                "model that it was made of, or one that holds it"
            ) from error

    def _attach_to_all(self, modules: Iterable[tuple[int, str, nn.Module]]) -> None:
        refused: list[str] = []
        for number, name, module in modules:
            if module is self._modules.root:
                continue
            hook = self._compiled.hook(number, name, module, self._log.hook(number, module, self._after_module))
            try:
                self._attach_gradients(number, module)
                self._handles_of[number].append(module.register_forward_hook(hook, with_kwargs=True))
            except Exception as error:
                if not any(name.startswith(f"{other}.") for other in refused):  # what is in it was told with it
                    warn_user(f"{name} ({type(module).__name__}) takes no hooks, and is not watched: {error}")
                refused.append(name)
                self._compiled.drop(number)

    def _attach_gradients(self, number: int, module: nn.Module) -> None:
        handles = self._handles_of[number] = []
        if self._gradients is not None:
            handles.append(module.register_forward_hook(self._gradients.hook(number, module), with_kwargs=True))
