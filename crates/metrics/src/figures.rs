//! Which figures there are, and what they are called.

use hearth_engine::stats::{DeviceStats, DiskStats, Latencies, PoolStats};
use hearth_engine::tally::Tally;

use crate::text::{Form, Kind, Page};

/// Bytes of a block.
const BLOCK: u64 = 4096;
/// Most series of one disk, or of one datastore's files that are not the busiest. One of them is its health.
pub const SERIES_MAX: usize = 60;
/// What the files of a datastore that have no rows of their own are called.
const REST: &str = "(other files)";
/// Of several disks told of together, the longest.
const LONGEST: &str = "hearth_disk_dirty_seconds";
const DIRTY: &str = "hearth_disk_dirty_bytes";

/// Limits of the latency buckets, microseconds: powers of two, at which the engine's own buckets end, so that no
/// request is counted on the wrong side. A hit takes some hundred microseconds, a miss some milliseconds.
const LIMITS_US: [u64; 6] = [128, 512, 2048, 8192, 32_768, 131_072];
/// The same in seconds, as labels.
const LIMITS: [&str; 6] = [
    "0.000128", "0.000512", "0.002048", "0.008192", "0.032768", "0.131072",
];

/// A disk's figures.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    /// Its name; for a file of a datastore, its path in it.
    pub name: String,
    /// The datastore it is a file of.
    pub datastore: Option<String>,
    /// Clients are served.
    pub served: bool,
    /// What was dirty went with the flash, and nobody knows how much it was.
    pub dirty_unknown: bool,
    /// What the engine counted.
    pub stats: DiskStats,
    /// How long requests took.
    pub latencies: Latencies,
}

impl Disk {
    fn requests(&self) -> u64 {
        let c = &self.stats.counters;
        let reads = c.read_hits + c.read_partial_hits + c.read_misses;
        reads + c.write_hits + c.write_partial_hits + c.write_misses
    }
}

/// Disks that are told of together.
#[derive(Clone, Debug)]
pub struct Row {
    name: String,
    of: Vec<Disk>,
}

impl Row {
    fn alone(disk: Disk) -> Row {
        Row {
            name: disk.name.clone(),
            of: vec![disk],
        }
    }

    fn datastore(&self) -> Option<&str> {
        self.of.first()?.datastore.as_deref()
    }

    fn value(&self, name: &str, of: fn(&DiskStats) -> f64) -> f64 {
        let all = self.of.iter().map(|d| of(&d.stats));
        // Times of several do not add up.
        if name == LONGEST {
            all.fold(0.0, f64::max)
        } else {
            all.sum()
        }
    }
}

/// Leaves rows of their own to the `busiest` files of datastores, and adds the others up, a row for each
/// datastore. Disks have theirs.
pub fn fold(disks: Vec<Disk>, busiest: usize) -> Vec<Row> {
    let (mut files, disks): (Vec<Disk>, Vec<Disk>) =
        disks.into_iter().partition(|d| d.datastore.is_some());
    files.sort_by(|a, b| {
        let busy = b.requests().cmp(&a.requests());
        busy.then_with(|| (&a.datastore, &a.name).cmp(&(&b.datastore, &b.name)))
    });
    let others = files.split_off(busiest.min(files.len()));
    let mut rows: Vec<Row> = disks.into_iter().chain(files).map(Row::alone).collect();
    let own = rows.len();
    for file in others {
        let known = rows[own..]
            .iter_mut()
            .find(|r| r.datastore() == file.datastore.as_deref());
        match known {
            Some(row) => row.of.push(file),
            None => rows.push(Row {
                name: REST.to_owned(),
                of: vec![file],
            }),
        }
    }
    rows
}

/// The pool's figures.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    /// Hearth's version.
    pub version: String,
    /// The pool's number.
    pub uuid: String,
    /// When the daemon began to serve, seconds since 1970.
    pub started: u64,
    /// Bytes of all disks that their origins do not have yet.
    pub dirty: u64,
    /// Threads that do not come round.
    pub stuck: u64,
    /// Lines of the log that nothing read.
    pub log_dropped: u64,
    /// What the engine counted.
    pub stats: PoolStats,
    /// Its flash devices.
    pub devices: Vec<Device>,
    /// Who else uses them.
    pub swap: Swap,
}

/// The kernel's swap on the flash of a pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct Swap {
    /// Bytes that were swapped out there.
    pub written: u64,
    /// Bytes that came back.
    pub read: u64,
    /// Seconds until a page was back lately; 0 while too few come to tell.
    pub latency: f64,
    /// The cache leaves what nobody waits for, because swap is held up.
    pub yields: bool,
}

/// A flash device's figures.
#[derive(Clone, Debug, Default)]
pub struct Device {
    /// Where it is.
    pub path: String,
    /// What the engine counted.
    pub stats: DeviceStats,
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// A page of everything.
pub fn page(form: Form, pool: &Pool, rows: &[Row]) -> String {
    let mut page = Page::new(form);
    of_pool(&mut page, pool);
    of_devices(&mut page, pool);
    of_disks(&mut page, rows);
    page.end()
}

fn of_pool(page: &mut Page, pool: &Pool) {
    use Kind::{Counter, Gauge};
    let stats = &pool.stats;
    let c = &stats.counters;
    let about = [("version", &*pool.version), ("pool", &*pool.uuid)];
    page.family(
        "hearth_build_info",
        Gauge,
        "What serves which pool; always 1.",
    );
    page.value(&about, 1.0);
    let mut one = |name, kind, help, value: f64| {
        page.family(name, kind, help);
        page.value(&[], value);
    };
    let blocks = |n: u64| (n * BLOCK) as f64;
    one(
        "hearth_start_time_seconds",
        Gauge,
        "When the daemon began to serve, since 1970.",
        pool.started as f64,
    );
    one(
        "hearth_flash_failed",
        Gauge,
        "1 if the flash is not written any more; disks go on from their origins.",
        f64::from(u8::from(stats.flash_failed)),
    );
    one(
        "hearth_stuck_threads",
        Gauge,
        "Threads that do not come round; their clients get no answers.",
        pool.stuck as f64,
    );
    one(
        "hearth_log_dropped_lines",
        Counter,
        "Lines of the log that were dropped because nothing read it.",
        pool.log_dropped as f64,
    );
    one(
        "hearth_pool_capacity_bytes",
        Gauge,
        "Flash for cached data.",
        blocks(stats.capacity_blocks),
    );
    one(
        "hearth_pool_swap_bytes",
        Gauge,
        "Flash of the pool that is set aside for the kernel's swap.",
        blocks(stats.set_aside_blocks),
    );
    one(
        "hearth_pool_cached_bytes",
        Gauge,
        "Data cached on flash.",
        blocks(stats.cached_blocks),
    );
    one(
        "hearth_pool_dirty_bytes",
        Gauge,
        "Data that the origins do not have yet.",
        pool.dirty as f64,
    );
    one(
        "hearth_pool_segments",
        Gauge,
        "Segments of the log.",
        stats.segments as f64,
    );
    one(
        "hearth_pool_free_segments",
        Gauge,
        "Segments that are free to write.",
        stats.free_segments as f64,
    );
    one(
        "hearth_memory_bytes",
        Gauge,
        "RAM for index, policy and RAM stage.",
        stats.footprint_bytes as f64,
    );
    one(
        "hearth_ram_stage_bytes",
        Gauge,
        "Data cached in RAM only: read lately, not on flash.",
        blocks(stats.stage_blocks),
    );
    one(
        "hearth_endurance_used_ratio",
        Gauge,
        "How much of the endurance budget is used up lately; 0 without one.",
        f64::from(stats.endurance_pressure) / 256.0,
    );
    one(
        "hearth_endurance_bytes_per_second",
        Gauge,
        "What may be written to flash in the long run, by the cache and swap together; 0 without a budget.",
        stats.endurance.map_or(0.0, |(rate, _)| rate as f64),
    );
    one(
        "hearth_swap_written_bytes",
        Counter,
        "Swapped out to the flash.",
        pool.swap.written as f64,
    );
    one(
        "hearth_swap_read_bytes",
        Counter,
        "Read back from swap inside the pool.",
        pool.swap.read as f64,
    );
    one(
        "hearth_swap_read_seconds",
        Gauge,
        "How long it takes lately until a page is back from swap inside the pool; 0 while too few come to tell.",
        pool.swap.latency,
    );
    one(
        "hearth_swap_cache_yields",
        Gauge,
        "1 while the cache leaves what nobody waits for, because swap on the same flash is held up.",
        f64::from(u8::from(pool.swap.yields)),
    );
    one(
        "hearth_flash_written_bytes",
        Counter,
        "Written to flash, everything included.",
        c.flash_write_bytes as f64,
    );
    one(
        "hearth_flash_payload_bytes",
        Counter,
        "Of what was written to flash, client data and fills.",
        c.flash_payload_bytes as f64,
    );
    one(
        "hearth_flash_moved_bytes",
        Counter,
        "Of what was written to flash, blocks appended again.",
        c.flash_reinsert_bytes as f64,
    );
    one(
        "hearth_flash_read_bytes",
        Counter,
        "Read from flash.",
        c.flash_read_bytes as f64,
    );
    one(
        "hearth_flash_flushes",
        Counter,
        "Flushes of the flash device.",
        c.flash_flushes as f64,
    );
    one(
        "hearth_flash_errors",
        Counter,
        "Failed operations on flash.",
        c.flash_errors as f64,
    );
}

/// What a device is doing, in one word.
const STATES: [&str; 4] = ["serving", "slow", "lost", "failed"];

fn state(pool: &Pool, device: &Device) -> &'static str {
    match (
        pool.stats.flash_failed,
        device.stats.lost,
        device.stats.slow,
    ) {
        (true, ..) => "failed",
        (false, true, _) => "lost",
        (false, false, true) => "slow",
        (false, false, false) => "serving",
    }
}

/// A family of which every flash device has a value for each kind of operation, or only one.
type OfDevice = (
    &'static str,
    Kind,
    &'static str,
    &'static [(Option<&'static str>, fn(&DeviceStats) -> f64)],
);

const OF_DEVICE: &[OfDevice] = &[
    (
        "hearth_flash_device_operations",
        Kind::Counter,
        "Operations on the device that ended, well or not.",
        &[
            (Some("read"), |d| d.figures.reads as f64),
            (Some("write"), |d| d.figures.writes as f64),
            (Some("flush"), |d| d.figures.flushes as f64),
        ],
    ),
    (
        "hearth_flash_device_seconds",
        Kind::Counter,
        "Time that they took.",
        &[
            (Some("read"), |d| seconds(d.figures.read_ns)),
            (Some("write"), |d| seconds(d.figures.write_ns)),
            (Some("flush"), |d| seconds(d.figures.flush_ns)),
        ],
    ),
    (
        "hearth_flash_device_bytes",
        Kind::Counter,
        "Read from the device and written to it.",
        &[
            (Some("read"), |d| d.figures.read_bytes as f64),
            (Some("write"), |d| d.figures.write_bytes as f64),
        ],
    ),
    (
        "hearth_flash_device_errors",
        Kind::Counter,
        "Operations on the device that failed.",
        &[(None, |d| d.figures.errors as f64)],
    ),
    (
        "hearth_flash_device_segments",
        Kind::Gauge,
        "Segments of the log on the device.",
        &[(None, |d| d.segments as f64)],
    ),
    (
        "hearth_flash_device_free_segments",
        Kind::Gauge,
        "Of these, those that are free to write.",
        &[(None, |d| d.free_segments as f64)],
    ),
    (
        "hearth_flash_device_cached_bytes",
        Kind::Gauge,
        "Data cached on the device.",
        &[(None, |d| (d.cached_blocks * BLOCK) as f64)],
    ),
    (
        "hearth_flash_device_dirty_bytes",
        Kind::Gauge,
        "Of this, what the origins do not have yet.",
        &[(None, |d| (d.dirty_blocks * BLOCK) as f64)],
    ),
];

fn of_devices(page: &mut Page, pool: &Pool) {
    page.family(
        "hearth_flash_device_state",
        Kind::Gauge,
        "1 for the state the device is in: serving, slow (it gets no more than it must), lost (another one has what was on it) or failed (the flash is given up).",
    );
    for device in &pool.devices {
        for word in STATES {
            let is = f64::from(u8::from(state(pool, device) == word));
            page.value(&[("device", &*device.path), ("state", word)], is);
        }
    }
    for (name, kind, help, values) in OF_DEVICE {
        page.family(name, *kind, help);
        for device in &pool.devices {
            for (op, value) in *values {
                let mut labels = vec![("device", &*device.path)];
                labels.extend(op.map(|op| ("op", op)));
                page.value(&labels, value(&device.stats));
            }
        }
    }
}

/// A family of which every disk has one value or several: the other labels, and how each is counted.
type Values = &'static [(
    &'static [(&'static str, &'static str)],
    fn(&DiskStats) -> f64,
)];

macro_rules! families {
    ($($kind:ident $name:literal $help:literal [$($({$($label:ident = $word:literal),+})? $stats:ident => $value:expr);+ $(;)?])*) => {
        const FAMILIES: &[(&str, Kind, &str, Values)] = &[$((
            $name,
            Kind::$kind,
            $help,
            &[$((&[$($((stringify!($label), $word)),+)?], |$stats: &DiskStats| $value)),+],
        )),*];
    };
}

families! {
    Counter "hearth_disk_requests" "Requests of clients, by how much of them was cached." [
        {op = "read", result = "hit"} s => s.counters.read_hits as f64;
        {op = "read", result = "partial"} s => s.counters.read_partial_hits as f64;
        {op = "read", result = "miss"} s => s.counters.read_misses as f64;
        {op = "write", result = "hit"} s => s.counters.write_hits as f64;
        {op = "write", result = "partial"} s => s.counters.write_partial_hits as f64;
        {op = "write", result = "miss"} s => s.counters.write_misses as f64;
    ]
    Counter "hearth_disk_flushes" "Flushes of clients." [ s => s.counters.flushes as f64 ]
    Counter "hearth_disk_request_errors" "Requests answered with an error." [ s => s.counters.errors as f64 ]
    Counter "hearth_disk_request_seconds" "Time that requests took, as clients saw it." [
        {op = "read"} s => seconds(s.counters.read_ns);
        {op = "write"} s => seconds(s.counters.write_ns);
    ]
    Counter "hearth_disk_read_bytes" "Read by clients, by where it came from." [
        {source = "flash"} s => s.counters.read_hit_bytes.saturating_sub(s.counters.stage_hit_bytes) as f64;
        {source = "ram"} s => s.counters.stage_hit_bytes as f64;
        {source = "origin"} s => s.counters.read_miss_bytes as f64;
    ]
    Counter "hearth_disk_written_bytes" "Written by clients." [ s => s.counters.write_bytes as f64 ]
    Counter "hearth_disk_origin_requests" "Operations sent to the origin." [
        {op = "read"} s => s.counters.origin_reads as f64;
        {op = "write"} s => s.counters.origin_writes as f64;
    ]
    Counter "hearth_disk_origin_seconds" "Time that operations on the origin took." [
        {op = "read"} s => seconds(s.counters.origin_read_ns);
        {op = "write"} s => seconds(s.counters.origin_write_ns);
    ]
    Counter "hearth_disk_origin_bytes" "Moved from and to the origin." [
        {op = "read"} s => s.counters.origin_read_bytes as f64;
        {op = "write"} s => s.counters.origin_write_bytes as f64;
    ]
    Counter "hearth_disk_origin_errors" "Failed operations on the origin." [ s => s.counters.origin_errors as f64 ]
    Counter "hearth_disk_bad_blocks" "Blocks on flash whose checksum failed: clean ones were read again from the origin, dirty ones are lost." [
        {state = "clean"} s => s.counters.bad_clean_blocks as f64;
        {state = "dirty"} s => s.counters.bad_dirty_blocks as f64;
    ]
    Gauge "hearth_disk_cached_bytes" "Data of the disk on flash." [ s => (s.cached_blocks * BLOCK) as f64 ]
    Gauge "hearth_disk_dirty_bytes" "Data that the origin does not have yet; absent where nobody knows how much that is." [ s => s.owed_bytes() as f64 ]
    Gauge "hearth_disk_dirty_seconds" "Time since the disk last had nothing dirty; 0 if it is clean; absent where nobody knows." [ s => seconds(s.dirty_for_ns) ]
    Gauge "hearth_disk_origin_behind_seconds" "Of an ordered disk: time for which the origin has lacked something that was flushed." [ s => seconds(s.behind_ns) ]
}

fn of_disks(page: &mut Page, rows: &[Row]) {
    page.family("hearth_disk_up", Kind::Gauge, "1 if the disk is served.");
    for row in rows {
        let up = row.of.iter().all(|d| d.served);
        page.value(&labels(row, &[]), f64::from(u8::from(up)));
    }
    for (name, kind, help, values) in FAMILIES {
        page.family(name, *kind, help);
        // No number is better than one that says clean.
        let of_dirty = [DIRTY, LONGEST].contains(name);
        let unknown = |row: &&Row| of_dirty && row.of.iter().any(|d| d.dirty_unknown);
        for row in rows.iter().filter(|row| !unknown(row)) {
            for (more, value) in *values {
                page.value(&labels(row, more), row.value(name, *value));
            }
        }
    }
    page.family(
        "hearth_disk_request_duration_seconds",
        Kind::Histogram,
        "How long requests took, as clients saw it; for the mean there is hearth_disk_request_seconds.",
    );
    type Which = fn(&Latencies) -> &Tally;
    let kinds: [(&str, &str, Which); 4] = [
        ("read", "hit", |l| &l.read_hit),
        ("read", "miss", |l| &l.read_miss),
        ("write", "hit", |l| &l.write_hit),
        ("write", "miss", |l| &l.write_miss),
    ];
    for row in rows {
        for (op, result, tally) in kinds {
            let tallies = || row.of.iter().map(|d| tally(&d.latencies));
            let count = tallies().map(Tally::count).sum::<u64>() as f64;
            let mut put = |suffix, more: &[(&'static str, &'static str)], value| {
                let mut all = labels(row, &[("op", op), ("result", result)]);
                all.extend(more);
                page.sample(suffix, &all, value);
            };
            for (limit, us) in LIMITS.into_iter().zip(LIMITS_US) {
                let below: u64 = tallies().map(|t| t.below(us)).sum();
                put("_bucket", &[("le", limit)], below as f64);
            }
            // No `_count`: OpenMetrics has it only beside a sum, and it would be the same figure again.
            put("_bucket", &[("le", "+Inf")], count);
        }
    }
}

fn labels<'a>(row: &'a Row, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut labels = vec![("disk", row.name.as_str())];
    labels.extend(row.datastore().map(|store| ("datastore", store)));
    labels.extend(more);
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(name: &str, datastore: Option<&str>, read_hits: u64) -> Disk {
        let mut disk = Disk {
            name: name.to_owned(),
            datastore: datastore.map(str::to_owned),
            served: true,
            ..Disk::default()
        };
        disk.stats.counters.read_hits = read_hits;
        disk.latencies.read_hit = Tally::of([(100, read_hits)].into_iter());
        disk
    }

    fn series<'a>(page: &'a str, of: &str) -> Vec<&'a str> {
        let label = format!("disk=\"{of}\"");
        page.lines().filter(|l| l.contains(&label)).collect()
    }

    #[test]
    fn a_disk_has_at_most_sixty_series_and_none_twice() {
        let page = page(
            Form::OpenMetrics,
            &Pool::default(),
            &[Row::alone(disk("a", None, 1))],
        );
        let series = series(&page, "a");
        assert!(series.len() < SERIES_MAX, "{}", series.len());
        let names = series.iter().map(|l| l.rsplit_once(' ').unwrap().0);
        let different: std::collections::BTreeSet<&str> = names.collect();
        assert_eq!(different.len(), series.len());
    }

    #[test]
    fn what_nobody_knows_to_be_dirty_is_no_number() {
        let (mut known, mut unknown) = (disk("a", None, 1), disk("b", None, 1));
        known.stats.dirty_blocks = 3;
        unknown.dirty_unknown = true;
        let rows = [Row::alone(known), Row::alone(unknown)];
        let page = page(Form::OpenMetrics, &Pool::default(), &rows);
        let of = |name: &str| {
            let all = series(&page, name);
            let dirty = all.iter().find(|l| l.starts_with(DIRTY)).copied();
            let others = all.iter().filter(|l| !l.starts_with("hearth_disk_dirty"));
            (others.count(), dirty.map(|l| l.rsplit_once(' ').unwrap().1))
        };
        let (all, dirty) = of("a");
        assert_eq!(dirty, Some("12288"));
        assert_eq!(of("b"), (all, None));
        assert!(
            !series(&page, "b")
                .iter()
                .any(|l| l.starts_with("hearth_disk_dirty"))
        );
    }

    #[test]
    fn latencies_are_counted_on_the_right_side_of_each_limit() {
        let mut one = disk("a", None, 0);
        let values = [
            (127, 1),
            (128, 10),
            (2047, 100),
            (2048, 1000),
            (9_000_000, 10_000),
        ];
        one.latencies.write_miss = Tally::of(values.into_iter());
        let page = page(Form::OpenMetrics, &Pool::default(), &[Row::alone(one)]);
        let counts: Vec<&str> = page
            .lines()
            .filter(|l| l.contains("duration_seconds") && l.contains("\"write\",result=\"miss\""))
            .map(|l| l.rsplit_once(' ').unwrap().1)
            .collect();
        assert_eq!(counts, ["1", "11", "111", "1111", "1111", "1111", "11111"]);
    }

    #[test]
    fn limits_and_their_labels_are_the_same() {
        for (us, label) in LIMITS_US.iter().zip(LIMITS) {
            assert!(us.is_power_of_two());
            assert_eq!(label.parse::<f64>().unwrap(), *us as f64 / 1e6);
        }
    }

    #[test]
    fn the_busiest_files_have_rows_and_the_others_share_one() {
        let disks = vec![
            disk("x", Some("s"), 1),
            disk("y", Some("s"), 30),
            disk("d", None, 0),
            disk("z", Some("s"), 4),
            disk("w", Some("t"), 2),
        ];
        let rows = fold(disks, 1);
        let told: Vec<(&str, Option<&str>, u64)> = rows
            .iter()
            .map(|r| {
                (
                    &*r.name,
                    r.datastore(),
                    r.of.iter().map(|d| d.stats.counters.read_hits).sum(),
                )
            })
            .collect();
        assert_eq!(
            told,
            [
                ("d", None, 0),
                ("y", Some("s"), 30),
                (REST, Some("s"), 5),
                (REST, Some("t"), 2)
            ]
        );
        let page = page(Form::Plain, &Pool::default(), &rows);
        let all = r#"hearth_disk_requests_total{disk="(other files)",datastore="s",op="read",result="hit"} 5"#;
        assert!(page.contains(all), "{page}");
    }

    #[test]
    fn every_figure_is_documented() {
        let docs = include_str!("../../../docs/metrics.md");
        let page = page(Form::Plain, &Pool::default(), &[]);
        for line in page.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').unwrap();
                let row = format!("| `{name}` | {help} |");
                assert!(
                    docs.contains(&row),
                    "docs/metrics.md lacks this row:\n{row}"
                );
            }
        }
    }

    #[test]
    fn each_flash_device_has_its_own_figures_and_one_state() {
        let device = |path: &str, slow: bool, errors: u64| {
            let mut device = Device {
                path: path.to_owned(),
                ..Device::default()
            };
            device.stats.slow = slow;
            device.stats.figures.errors = errors;
            device.stats.figures.read_ns = 2_500_000_000;
            device
        };
        let mut pool = Pool {
            devices: vec![device("/dev/a", false, 0), device("/dev/b", true, 7)],
            ..Pool::default()
        };
        let told = page(Form::Plain, &pool, &[]);
        for line in [
            r#"hearth_flash_device_state{device="/dev/a",state="serving"} 1"#,
            r#"hearth_flash_device_state{device="/dev/a",state="slow"} 0"#,
            r#"hearth_flash_device_state{device="/dev/b",state="slow"} 1"#,
            r#"hearth_flash_device_state{device="/dev/b",state="serving"} 0"#,
            r#"hearth_flash_device_errors_total{device="/dev/b"} 7"#,
            r#"hearth_flash_device_seconds_total{device="/dev/a",op="read"} 2.5"#,
        ] {
            assert!(told.contains(line), "{line} is missing:\n{told}");
        }
        pool.devices[1].stats.lost = true;
        let told = page(Form::Plain, &pool, &[]);
        let lost = r#"{device="/dev/b",state="lost"} 1"#;
        assert!(told.contains(lost), "{told}");
        pool.stats.flash_failed = true;
        let told = page(Form::Plain, &pool, &[]);
        assert!(
            told.contains(r#"{device="/dev/b",state="failed"} 1"#),
            "{told}"
        );
    }
}
