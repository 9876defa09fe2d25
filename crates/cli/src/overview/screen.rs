//! What `hearth status` puts on a screen, and no more than fits on one.
//!
//! Whoever types it looks at a terminal, often one of 80 columns and 24 rows: what is wrong must not have scrolled away under
//! what is well. So long sentences are folded, names cut, and of many disks the first ones are shown. A file or a pipe has room for
//! everything, and a program asks for `--json`.

use std::fmt::Write as _;
use std::io::IsTerminal;

use hearth_daemon::size::human;
use hearth_events::time::utc;
use hearth_health::{Condition, Item, Kind};

use super::{DatastoreRow, DiskRow, Status};
use crate::stats::percent;
use crate::table::{Table, cut, plain};

/// Disks shown where there is no end of rows.
const DISKS: usize = 20;
/// Rows of disks shown however much is wrong, and of events with the empty one before them.
const LEAST: usize = 3;
const EVENTS: usize = 3;
/// An empty row and one of headings.
const AROUND: usize = 2;
/// Of more drives and arrays than so many, only how many are how.
const DEVICES: usize = 4;
/// Of more datastores than this, a terminal shows the sums only.
const DATASTORES: usize = 2;
/// Nothing can be read in fewer columns.
const NARROW: usize = 40;
/// Columns that what is wrong begins after.
const INDENT: usize = 13;

/// How much there is room for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    columns: usize,
    rows: usize,
}

impl Room {
    /// A file, or a program that reads.
    pub(super) const UNBOUNDED: Room = Room {
        columns: usize::MAX,
        rows: usize::MAX,
    };

    /// What standard output is.
    pub(super) fn here() -> Room {
        if !std::io::stdout().is_terminal() {
            return Room::UNBOUNDED;
        }
        match ratatui::crossterm::terminal::size() {
            Ok((columns, rows)) if columns > 0 && rows > 0 => Room {
                columns: usize::from(columns).max(NARROW),
                rows: usize::from(rows),
            },
            _ => Room::UNBOUNDED,
        }
    }

    fn is_bounded(self) -> bool {
        self.rows != usize::MAX
    }
}

/// The whole screen.
pub(super) fn text(status: &Status, room: Room) -> String {
    let top = format!("health: {}\n", status.condition.word());
    let middle = pool(status, room);
    let least = least(status.disks.len());
    // The last row is for what is typed next.
    let left = room.rows.saturating_sub(lines(&top) + lines(&middle) + 1);
    let wrong = wrong(status, room, left.saturating_sub(least + EVENTS));
    let left = left.saturating_sub(lines(&wrong));
    let events = events(status, room, left.saturating_sub(least));
    let disks = disks(status, room, left.saturating_sub(lines(&events)));
    [top, wrong, middle, disks, events].concat()
}

fn lines(text: &str) -> usize {
    text.bytes().filter(|b| *b == b'\n').count()
}

/// Rows that some of so many disks take, however much is wrong.
fn least(disks: usize) -> usize {
    match disks {
        0 => 1,
        n if n <= LEAST => AROUND + n,
        _ => AROUND + LEAST + 1,
    }
}

/// What is wrong and what to do, the worst first, in so many rows; the worst in as many as it takes.
fn wrong(status: &Status, room: Room, most: usize) -> String {
    let mut out = String::new();
    let bad = status.health.bad();
    for (done, item) in bad.iter().enumerate() {
        let mut one = String::new();
        reasons(&mut one, item, room);
        let more = bad.len() - done;
        if done > 0 && lines(&out) + lines(&one) + usize::from(more > 1) > most {
            let _ = writeln!(
                out,
                "  and {more} more; `hearth status --json` has all of it"
            );
            break;
        }
        out.push_str(&one);
    }
    out
}

/// What there is besides disks: what could not be looked at, the pool, whether it helps, drives.
fn pool(status: &Status, room: Room) -> String {
    let mut out = String::new();
    for note in &status.health.notes {
        folded(&mut out, "  note: ", 8, &plain(note), room);
    }
    if let Some(p) = &status.pool {
        let pool = format!(
            "{}, {}; {} of {} used, {} dirty",
            plain(&p.name),
            p.state,
            human(p.cached),
            human(p.capacity),
            human(p.dirty)
        );
        folded(&mut out, "pool: ", 6, &pool, room);
        folded(&mut out, "flash: ", 7, &plain(&p.flash.join(", ")), room);
        let hits = format!(
            "{} in the last 5 minutes, {} over the day",
            percent(p.hit_ratio_now),
            percent(p.hit_ratio_day)
        );
        folded(&mut out, "reads that hit: ", 16, &hits, room);
    }
    if let Some(h) = &status.helping {
        folded(&mut out, "is it helping? ", 15, &h.sentence, room);
    }
    datastores(&mut out, status, room);
    devices(&mut out, status, room);
    out
}

fn datastores(out: &mut String, status: &Status, room: Room) {
    let all = &status.datastores;
    if room.is_bounded() && all.len() > DATASTORES {
        let served = all.iter().filter(|d| d.served).count();
        let sum = |of: fn(&DatastoreRow) -> u64| all.iter().map(of).fold(0, u64::saturating_add);
        let line = format!(
            "{served} served, {} not served; {} of {} files in use, {} dirty",
            all.len() - served,
            sum(|d| d.open),
            sum(|d| d.disks),
            human(sum(|d| d.dirty))
        );
        folded(out, "datastores: ", 12, &line, room);
        return;
    }
    for d in all {
        let line = format!(
            "{}, {}; {} of {} files in use, {} dirty",
            plain(&d.name),
            if d.served { "served" } else { "not served" },
            d.open,
            d.disks,
            human(d.dirty)
        );
        folded(out, "datastore: ", 11, &line, room);
    }
}

fn reasons(out: &mut String, item: &Item, room: Room) {
    let about = match item.about.as_str() {
        "" => String::new(),
        about => format!(" ({})", plain(about)),
    };
    for reason in &item.reasons {
        let what = format!(
            "{} {}{about}: {}",
            item.kind.word(),
            plain(&item.name),
            plain(&reason.what)
        );
        let condition = format!("  {:10} ", reason.condition.word());
        folded(out, &condition, INDENT, &what, room);
        if !reason.remedy.is_empty() {
            let indent = " ".repeat(INDENT);
            folded(out, &indent, INDENT, &plain(&reason.remedy), room);
        }
    }
}

/// A sentence behind `first`, in as many lines as it takes; those that follow begin after `indent` columns.
fn folded(out: &mut String, first: &str, indent: usize, text: &str, room: Room) {
    let mut line = first.to_owned();
    let mut empty = true;
    for word in text.split(' ') {
        let gap = usize::from(!empty);
        if !empty && line.chars().count() + gap + word.chars().count() > room.columns {
            let _ = writeln!(out, "{}", line.trim_end());
            line = " ".repeat(indent);
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line.push_str(word);
        empty = false;
    }
    let _ = writeln!(out, "{}", line.trim_end());
}

fn devices(out: &mut String, status: &Status, room: Room) {
    let devices: Vec<&Item> = (status.health.items.iter())
        .filter(|i| i.kind == Kind::Device)
        .collect();
    if devices.is_empty() {
        return;
    }
    if room.is_bounded() && devices.len() > DEVICES {
        // What is wrong with one of them stands above already.
        let of = |condition: Condition| {
            let count = devices.iter().filter(|d| d.condition == condition).count();
            (count > 0).then(|| format!("{count} {}", condition.word()))
        };
        let all = [
            Condition::Failed,
            Condition::Degraded,
            Condition::Rebuilding,
            Condition::Unknown,
            Condition::Healthy,
        ];
        let counted: Vec<String> = all.into_iter().filter_map(of).collect();
        folded(out, "drives, arrays: ", 16, &counted.join(", "), room);
        return;
    }
    out.push('\n');
    let mut table = Table::new(&["DEVICE", "HEALTH", ">DISKS", "WHAT"]);
    for d in devices {
        table.row([
            plain(&d.name),
            d.condition.word().to_owned(),
            d.disks.len().to_string(),
            plain(&d.about),
        ]);
    }
    for line in table.render().lines() {
        let _ = writeln!(out, "{}", cut(line, room.columns));
    }
}

fn disks(status: &Status, room: Room, left: usize) -> String {
    let mut out = String::new();
    if status.disks.is_empty() {
        if status.pool.is_some() {
            let none = "none yet; `hearth disk add NAME --origin PATH` adds one";
            folded(&mut out, "disks: ", 7, none, room);
        }
        return out;
    }
    out.push('\n');
    let mut table = Table::new(&[
        "DISK",
        "STATE",
        ">READS/S",
        ">WRITES/S",
        ">HIT NOW",
        ">HIT DAY",
        ">CACHED",
        ">DIRTY",
    ]);
    // The worst first, then the busiest: those are what somebody looks for.
    let mut disks: Vec<&DiskRow> = status.disks.iter().collect();
    disks.sort_by(|a, b| {
        let load = |d: &DiskRow| d.reads_per_second + d.writes_per_second;
        b.condition
            .cmp(&a.condition)
            .then(load(b).total_cmp(&load(a)))
            .then(a.name.cmp(&b.name))
    });
    let all = left.saturating_sub(AROUND);
    let shown = match room.is_bounded() {
        true if disks.len() <= all => all,
        // A line says that there are more.
        true => all.saturating_sub(1).max(LEAST),
        false => DISKS,
    };
    for d in disks.iter().take(shown) {
        // Of one that is served, how it is; else why there is nothing to say of that.
        let state = match d.state {
            "attached" => d.condition.word(),
            other => other,
        };
        table.row([
            plain(&d.name),
            state.to_owned(),
            format!("{:.0}", d.reads_per_second),
            format!("{:.0}", d.writes_per_second),
            percent(d.hit_ratio_now),
            percent(d.hit_ratio_day),
            human(d.cached),
            human(d.dirty),
        ]);
    }
    table.fit(room.columns);
    out.push_str(&table.render());
    if let Some(more) = disks.len().checked_sub(shown).filter(|n| *n > 0) {
        let _ = writeln!(out, "and {more} more; see `hearth disk list`");
    }
    out
}

/// The newest events in at most so many rows, a line each: the whole of one that is cut is in `hearth events`.
fn events(status: &Status, room: Room, most: usize) -> String {
    let mut out = String::new();
    let shown = most.saturating_sub(1).min(status.events.len());
    if shown == 0 {
        return out;
    }
    out.push('\n');
    // The newest are the last.
    for event in status.events.iter().skip(status.events.len() - shown) {
        let disk = (event.disk.as_deref()).map_or(String::new(), |d| format!("{}: ", plain(d)));
        let line = format!(
            "{}  {:7}  {disk}{}",
            utc(event.at),
            event.severity,
            plain(&event.text)
        );
        let _ = writeln!(out, "{}", cut(&line, room.columns));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::{Helping, PoolRow};
    use super::*;
    use hearth_daemon::api::events::EventInfo;
    use hearth_health::{Reason, Report};

    const SMALL: Room = Room {
        columns: 80,
        rows: 24,
    };

    fn item(kind: Kind, name: &str, reasons: Vec<Reason>) -> Item {
        Item::new(kind, name, reasons)
    }

    fn disk(name: String) -> DiskRow {
        DiskRow {
            name,
            state: "attached",
            mode: "write-back-ordered",
            condition: Condition::Healthy,
            reads_per_second: 12345.0,
            writes_per_second: 12345.0,
            hit_ratio_now: Some(0.975),
            hit_ratio_day: Some(1.0),
            cached: 999 << 30,
            dirty: 123 << 20,
        }
    }

    /// A host on which much is wrong, with so many disks.
    fn status(disks: usize, bad: usize, devices: usize) -> Status {
        let remedy = "see that the server answers and that nothing is in the way of a connection to it; it is tried again by itself";
        let waiting = |n: usize| {
            let reason = Reason::failed(
                "disk-waiting",
                "the origin nbd://storage.example.org/vm is missing, so that the disk is not served",
                remedy,
            );
            item(Kind::Disk, &format!("web-{n}.example.org"), vec![reason])
        };
        let mut items: Vec<Item> = (0..bad).map(waiting).collect();
        items.extend((0..devices).map(|n| item(Kind::Device, &format!("nvme{n}n1"), Vec::new())));
        let notes = vec!["the second service is not there, so nothing is known of drives, arrays and file systems; start it with `hearth monitor`".to_owned()];
        let health = Report::new(0, items, notes);
        let event = EventInfo {
            id: 1,
            at: 0,
            event: "disk-waiting".to_owned(),
            severity: "warning".to_owned(),
            disk: Some("web-1.example.org".to_owned()),
            text: "The disk is not served, because its origin is missing; it is tried again."
                .to_owned(),
            details: serde_json::Map::default(),
        };
        Status {
            condition: health.condition,
            monitor: false,
            pool: Some(PoolRow {
                name: "pool".to_owned(),
                flash: vec!["/dev/disk/by-partlabel/hearth".to_owned()],
                state: "serving".to_owned(),
                capacity: 999 << 30,
                cached: 998 << 30,
                dirty: 123 << 20,
                hit_ratio_now: Some(0.975),
                hit_ratio_day: Some(0.975),
            }),
            helping: Some(Helping {
                sentence: "yes: without the cache, requests would take 3.8 times as long (estimate over the day)".to_owned(),
                speedup_day: Some(3.8),
                speedup_now: Some(3.8),
            }),
            disks: (0..disks).map(|n| disk(format!("web-{n}.example.org"))).collect(),
            datastores: Vec::new(),
            health,
            events: vec![event; 5],
            error: None,
        }
    }

    fn datastore(n: usize) -> DatastoreRow {
        DatastoreRow {
            name: format!("store-{n}"),
            served: n > 0,
            disks: 12,
            open: 3,
            dirty: 1536 << 20,
        }
    }

    #[test]
    fn datastores_show_dirty_data() {
        let mut status = status(9, 0, 0);
        status.datastores = (0..2).map(datastore).collect();
        let two = text(&status, SMALL);
        for line in [
            "\ndatastore: store-0, not served; 3 of 12 files in use, 1.5 GiB dirty\n",
            "\ndatastore: store-1, served; 3 of 12 files in use, 1.5 GiB dirty\n",
        ] {
            assert!(two.contains(line), "{two}");
        }
        assert!(fits(&two), "{two}");
        status.datastores = (0..40).map(datastore).collect();
        let many = text(&status, SMALL);
        let line = "\ndatastores: 39 served, 1 not served; 120 of 480 files in use, 60 GiB dirty\n";
        assert!(many.contains(line) && fits(&many), "{many}");
        let whole = text(&status, Room::UNBOUNDED);
        assert_eq!(whole.matches("datastore: store-").count(), 40, "{whole}");
    }

    fn fits(text: &str) -> bool {
        // The last row is the prompt's.
        text.lines().count() < SMALL.rows && text.lines().all(|l| l.chars().count() <= 80)
    }

    #[test]
    fn everything_is_on_a_small_screen() {
        for disks in [0, 1, 8, 9, 10, 11, 500] {
            for devices in [0, 1, 24] {
                let text = text(&status(disks, 0, devices), SMALL);
                assert!(fits(&text), "{disks} disks, {devices} devices:\n{text}");
                assert!(text.contains("is it helping? yes"), "{text}");
                assert_eq!(text.matches("warning").count(), 5, "the events: {text}");
            }
        }
        let many = text(&status(500, 0, 0), SMALL);
        assert!(
            many.contains("web-0.example.o… ") && many.contains("see `hearth disk list`"),
            "{many}"
        );
    }

    #[test]
    fn what_is_wrong_is_first_and_does_not_push_the_rest_off() {
        let text = text(&status(500, 300, 0), SMALL);
        assert!(
            text.starts_with("health: failed\n  failed     disk web-0.example.org: "),
            "{text}"
        );
        assert!(
            text.contains(" more; `hearth status --json` has all of it"),
            "{text}"
        );
        assert!(
            text.contains("pool: pool") && text.contains("web-10.example.…"),
            "{text}"
        );
        assert!(text.contains("warning") && fits(&text), "{text}");
    }

    #[test]
    fn a_file_gets_all_of_it() {
        let text = text(&status(30, 30, 6), Room::UNBOUNDED);
        assert_eq!(text.matches("tried again by itself").count(), 30, "{text}");
        assert_eq!(text.matches("nvme").count(), 6, "{text}");
        assert!(
            text.contains("and 10 more; see `hearth disk list`"),
            "{text}"
        );
        assert!(!text.contains('…'), "{text}");
    }

    #[test]
    fn a_disk_that_is_not_served_says_so_in_place_of_its_health() {
        let mut status = status(1, 0, 0);
        status.disks[0].state = "waiting";
        let text = text(&status, SMALL);
        assert!(
            text.contains("waiting") && !text.contains("healthy  "),
            "{text}"
        );
    }

    #[test]
    fn without_disks_it_says_how_to_add_one() {
        let text = text(&status(0, 0, 0), SMALL);
        assert!(
            text.contains("hearth disk add NAME --origin PATH"),
            "{text}"
        );
    }
}
