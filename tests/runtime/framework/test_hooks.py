"""Functions of other packages that are wrapped: checked when they are, listed, and put back."""

import sys
import threading
import types

import pytest

from sok_like.runtime.framework import hooks
from tests import forks


class Base:
    def method(self, first, second=2, *, third=3):
        return ("method", first, second, third)

    @staticmethod
    def static(first):
        return ("static", first)

    @classmethod
    def of_class(cls, first):
        return (cls.__name__, first)


class Child(Base):
    pass


@pytest.fixture
def undone():
    """Undoes what the test has wrapped, and nothing else."""
    before = list(hooks._hooks)
    yield
    for hook in list(hooks._hooks):
        if hook not in before:
            hook.undo()


def doubled(own, *args, **kwargs):
    return ("doubled", own(*args, **kwargs))


@pytest.mark.parametrize(
    "name, arguments, expected",
    [("method", (1,), ("method", 1, 2, 3)), ("static", (1,), ("static", 1))],
)
def test_a_method_is_wrapped_and_put_back(undone, name, arguments, expected):
    hook = hooks.wrap(Child, name, doubled, "a test")
    assert getattr(Child(), name)(*arguments) == ("doubled", expected)
    assert getattr(Base(), name)(*arguments) == expected
    hook.undo()
    assert getattr(Child(), name)(*arguments) == expected
    assert name not in vars(Child)


def test_a_base_may_be_wrapped_after_a_class_that_inherits_from_it(undone):
    hooks.wrap(Child, "method", doubled, "a test")
    hook = hooks.wrap(Base, "method", lambda own, *a, **k: ("base", own(*a, **k)), "a test")
    assert Child().method(1) == ("doubled", ("base", ("method", 1, 2, 3)))
    hook.undo()
    assert Child().method(1) == ("doubled", ("method", 1, 2, 3))


def test_a_class_method_is_wrapped_for_the_class_that_is_called(undone):
    hooks.wrap(Base, "of_class", doubled, "a test")
    assert Child.of_class(1) == ("doubled", ("Child", 1))
    assert Base().of_class(1) == ("doubled", ("Base", 1))


def test_copies_of_a_modules_function_are_replaced_too(undone, monkeypatch):
    def function(value):
        return value

    owner, user = types.ModuleType("some_package.owner"), types.ModuleType("some_package.user")
    owner.function = user.other_name = function
    monkeypatch.setitem(sys.modules, "some_package.owner", owner)
    monkeypatch.setitem(sys.modules, "some_package.user", user)
    hook = hooks.wrap("some_package.owner", "function", doubled, "a test")
    assert owner.function(1) == user.other_name(1) == ("doubled", 1)
    hook.undo()
    assert owner.function is user.other_name is function


def test_a_wrapper_may_name_the_first_arguments_and_no_others(undone):
    for wrapper in (
        lambda own, self, first, *args, **kwargs: None,
        lambda own, self, first, second=2, *, third=3: None,
        lambda own, *args, **kwargs: None,
        lambda own, self, *args, third, **kwargs: None,
    ):
        hooks.wrap(Base, "method", wrapper, "a test").undo()
    for wrapper in (
        lambda own, self, second, *args, **kwargs: None,  # in another order
        lambda own, self, first, second: None,  # does not take `third`
        lambda own, self, first, second, third: None,  # `third` comes by its name only
        lambda own, self, first, *args: None,
        lambda own, self, first, **kwargs: None,  # `second` may come by position
        lambda own, self, first, second, fourth, **kwargs: None,  # unknown
        lambda own, self, *args, fourth, **kwargs: None,
    ):
        with pytest.raises(ImportError, match=r"needs the function .*Base.method\(self.*2.16.2 to"):
            hooks.wrap(Base, "method", wrapper, "a test")
        assert Base().method(1) == ("method", 1, 2, 3)


def test_what_is_missing_raises_and_names_the_known_versions(undone):
    for wrap in (hooks.wrap, hooks.put):
        with pytest.raises(ImportError, match="Base.absent, and works with TensorFlow 2.16.2 to"):
            wrap(Base, "absent", doubled, "a test")
    with pytest.raises(ImportError, match="the module some_package.absent, and works with"):
        hooks.wrap("some_package.absent", "function", doubled, "a test")


def test_the_listing_says_whether_a_hook_is_in_effect(undone):
    hooks.wrap(Base, "method", doubled, "for a test")

    def state():
        (found,) = [row for row in hooks.listing(hooks.SCOPES) if row[0].endswith("Base.method")]
        assert found[1] == "for a test"
        return found[2]

    assert state() == "in place"
    ours = Base.method

    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    theirs.__wrapped__ = ours
    Base.method = theirs
    assert state() == "in place, within another wrapper"
    Base.method = lambda self: None
    assert state() == "not in effect: replaced by another package"
    Base.method = ours  # so that it can be undone


def test_within_knows_its_thread():
    within, seen = hooks.Within(), {}

    def look():
        seen["inside"] = bool(within)
        other = threading.Thread(target=lambda: seen.update(other=bool(within)))
        other.start()
        other.join()

    within(look)
    assert seen == {"inside": True, "other": False} and not within
    with pytest.raises(ZeroDivisionError):
        within(lambda: 1 / 0)
    assert not within


def test_init_wraps_all_or_nothing():
    """In a process of its own: hooks of this one must stay."""
    program = """
import sok_like as sok
from sok_like.runtime.framework import hooks
class Owner:
    def first(self): return 1
@hooks.at_init
def install():
    hooks.wrap(Owner, "first", lambda own, self: 10 * own(self), "a test")
assert Owner().first() == 1 and hooks.listing() == []
@hooks.at_init
def fails():
    hooks.wrap(Owner, "second", lambda own, self: 2, "a test")
for _ in range(2):
    try:
        sok.Init(global_batch_size=1)
    except ImportError as error:
        assert "Owner.second" in str(error), error
    else:
        raise AssertionError
    assert Owner().first() == 1 and hooks.listing() == []
Owner.second = lambda self: 3
sok.Init(global_batch_size=1)
assert Owner().first() == 10 and Owner().second() == 2
@hooks.at_init
def late():
    Owner.third = 4
assert Owner.third == 4
Owner.fourth = lambda self: 4
@hooks.behind("a door", "another")
def behind():
    hooks.wrap(Owner, "fourth", lambda own, self: 10 * own(self), "a test")
    hooks.wrap(Owner, "fifth", lambda own, self: 5, "a test")
assert Owner().fourth() == 4
for _ in range(2):
    try:
        hooks.open_door("a door")
    except ImportError as error:
        assert "Owner.fifth" in str(error), error
    else:
        raise AssertionError
    assert Owner().fourth() == 4 and Owner().first() == 10
@hooks.behind("an outer door")
def opens_another():
    hooks.open_door("another")
try:
    hooks.open_door("an outer door")
except ImportError:
    assert not hooks._open & {"an outer door", "another"}
else:
    raise AssertionError
Owner.fifth = lambda self: 3
hooks.open_door("another")
hooks.open_door("a door")
assert Owner().fourth() == 40
names = [name for name, _, _ in hooks.listing("another")]
assert names == ["__main__.Owner.fifth", "__main__.Owner.fourth"], names

# On one process hash tables need no hook of tapes and optimizers: norms know their gradients.
import tensorflow as tf
def tapes_and_optimizers():
    names = ("GradientTape.gradient", "._backend_apply_gradients", "._clip_gradients")
    return [name for name, _, _ in hooks.listing() if name.endswith(names)]
layer, kernel = sok.GroupEmbedding({"a": 2}), tf.constant([1.0, 2.0])
with tf.GradientTape() as tape:
    rows = [layer({"a": tf.constant(keys)})["a"] for keys in ([1, 2], [2, 2])]
    loss = tf.reduce_sum(tf.add_n(rows) * kernel)
(gradient,) = tape.gradient(loss, layer.trainable_variables)
# Key 1 has been read once, key 2 three times: the squares are 5 and 9 * 5.
for norm in (tf.linalg.global_norm([gradient]), tf.clip_by_global_norm([gradient], 1.0)[1]):
    assert abs(float(norm) ** 2 - 50.0) < 1e-3, norm
for clipped in (tf.clip_by_norm(gradient, 1.0), tf.clip_by_global_norm([gradient], 1.0)[0][0]):
    clipped = tf.math.unsorted_segment_sum(clipped.values, tf.cast(clipped.indices, tf.int32), 3)
    assert abs(float(tf.norm(clipped)) - 1.0) < 1e-5, clipped
import sok_like.dist_model_parallel.layer
assert tapes_and_optimizers() == []
from sok_like.lookup.local_variables import mark_local
mark_local(tf.Variable(0.0))
assert len(tapes_and_optimizers()) == 3, tapes_and_optimizers()

from sok_like.__main__ import wrapped
found = wrapped()
states = {state for _, _, state in found}
assert len(found) > 25 and states <= {"in place", "in place, within another wrapper"}, found
assert len(hooks.listing(hooks.EVERY)) < 25, hooks.listing(hooks.EVERY)
print("done")
"""
    done = forks.run("-c", program)
    assert done.stdout == "done\n", done.stderr
