"""What a table with policies must do, in dicts: the oracle of test_policies.py."""

import numpy as np


def unsigned(key):
    return key % 2**64


class Full(Exception):
    """The batch alone needs more rows than the capacity."""


class Model:
    """One table. Rows are float32 `[dim]`; a key starts from `initial[key % len(initial)]`."""

    def __init__(self, initial, capacity=0, policy=None):
        policy = dict(policy or {})
        self.initial = initial
        self.capacity = capacity
        self.filter_freq = policy.get("filter_freq", 0)
        self.max_waiting = policy.get("max_waiting", 0)
        self.occurrences = policy.get("count_occurrences", False)
        self.no_permission = np.float32(policy.get("no_permission", 0.0))
        self.steps_to_live = policy.get("steps_to_live", 0)
        self.l2_threshold = np.float32(policy.get("l2_threshold", -1.0))
        self.score = policy.get("score", "")
        self.buffer_size = policy.get("evicted_buffer", 0)
        self.rows, self.records, self.scores, self.waiting = {}, {}, {}, {}
        self.step = 0
        self.buffer = []
        self.counts = dict.fromkeys(
            ("found", "admitted", "refused", "forgotten", "written", "erased", "evicted", "popped"),
            0,
        )

    def initial_row(self, key):
        return self.initial[unsigned(key) % len(self.initial)]

    def read(self, key):
        if key in self.rows:
            return self.rows[key]
        if self.filter_freq > 1:
            return np.full_like(self.initial[0], self.no_permission)
        return self.initial_row(key)

    def score_of(self, key):
        frequency, last_step = self.records[key]
        return {"lru": last_step, "lfu": frequency, "custom": self.scores.get(key, 0)}[self.score]

    def lookup(self, keys):
        step, batch = self.step + 1, set(keys)
        admitted, refused, withheld = {}, {}, set()
        for key in batch - self.rows.keys():
            count, last_step = self.waiting.get(key, (0, -1))
            if self.occurrences and self.filter_freq > 1 and count < self.filter_freq:
                withheld.add(key)  # reads a waiting key's value, whether it gets a row or not
            count += keys.count(key) if self.occurrences else last_step != step
            target = admitted if self.filter_freq <= 1 or count >= self.filter_freq else refused
            target[key] = count
        self.make_room(set(admitted), batch)
        self.step = step
        for key in batch & self.rows.keys():
            frequency, last_step = self.records[key]
            if self.occurrences:
                self.records[key] = (frequency + keys.count(key), step)
            elif last_step != step:
                self.records[key] = (frequency + 1, step)
            self.counts["found"] += last_step != step
        for key, count in admitted.items():
            counted = self.occurrences or self.filter_freq > 1
            self.insert(key, self.initial_row(key), (count if counted else 1, step))
        for key, count in refused.items():
            self.counts["refused"] += self.waiting.get(key, (0, -1))[1] != step
            self.waiting[key] = (count, step)
        self.counts["admitted"] += len(admitted)
        self.forget_oldest()
        waits = np.full_like(self.initial[0], self.no_permission)
        return np.array([waits if key in withheld else self.read(key) for key in keys])

    def forget_oldest(self):
        """Of too many waiting keys, and an eighth more."""
        if not self.max_waiting or len(self.waiting) <= self.max_waiting:
            return
        oldest = sorted(self.waiting, key=lambda key: (self.waiting[key][1], unsigned(key)))
        for key in oldest[: len(oldest) - self.max_waiting + self.max_waiting // 8]:
            del self.waiting[key]
            self.counts["forgotten"] += 1

    def insert(self, key, row, record):
        self.rows[key] = row
        self.records[key] = record
        self.scores.pop(key, None)
        self.waiting.pop(key, None)

    def make_room(self, new, batch):
        excess = len(self.rows) + len(new) - self.capacity
        if not self.capacity or excess <= 0:
            return
        others = self.lowest_first(self.rows.keys() - batch)
        if len(others) < excess:
            raise Full
        self.remove(others[:excess])

    def lowest_first(self, keys):
        return sorted(keys, key=lambda key: (self.score_of(key), unsigned(key)))

    def remove(self, keys):
        for key in keys:
            self.buffer.append((key, self.rows.pop(key), *self.records.pop(key)))
            self.scores.pop(key, None)
        self.counts["evicted"] += len(keys)
        self.buffer = self.buffer[max(0, len(self.buffer) - self.buffer_size) :]

    def evict(self):
        def goes(key):
            late = self.steps_to_live and self.step - self.records[key][1] > self.steps_to_live
            return late or np.sum(np.square(self.rows[key], dtype=np.float64)) / 2 < threshold

        threshold = self.l2_threshold if self.l2_threshold >= 0 else -np.inf
        gone = sorted(filter(goes, self.rows), key=unsigned)
        self.remove(gone)
        if self.steps_to_live:
            self.waiting = {
                k: (c, s)
                for k, (c, s) in self.waiting.items()
                if self.step - s <= self.steps_to_live
            }
        return len(gone)

    def assign(self, keys, rows):
        new, batch = set(keys) - self.rows.keys(), set(keys)
        exceeds = self.capacity and len(batch) > self.capacity
        if exceeds:
            self.remove(self.lowest_first(self.rows.keys() - batch))
        else:
            self.make_room(new, batch)
        for key, row in zip(keys, rows, strict=True):
            if key in self.rows:
                self.rows[key] = row
            else:
                self.insert(key, row, (0, self.step))
        if exceeds:
            self.remove(self.lowest_first(self.rows)[: len(self.rows) - self.capacity])
        self.counts["written"] += len(new)

    def erase(self, keys):
        """The number of keys that had a row or waited."""
        known = set(keys) & (self.rows.keys() | self.waiting.keys())
        for key in known:
            self.waiting.pop(key, None)
            if self.rows.pop(key, None) is not None:
                del self.records[key]
                self.scores.pop(key, None)
                self.counts["erased"] += 1
        self.buffer = [evicted for evicted in self.buffer if evicted[0] not in set(keys)]
        return len(known)

    def assign_scores(self, keys, scores):
        for key, score in zip(keys, scores, strict=True):
            if key in self.rows:
                self.scores[key] = score

    def pop(self):
        popped, self.buffer = self.buffer, []
        self.counts["popped"] += len(popped)
        return popped

    def seen(self, key):
        """(present, frequency, last step) of a key."""
        if key in self.rows:
            return (True, *self.records[key])
        return (False, *self.waiting.get(key, (0, -1)))
