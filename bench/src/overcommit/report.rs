//! What came of each, as tables, and what of it was asked for.

use std::collections::BTreeMap;

use serde::Serialize;

use super::EACH;
use super::guests::active_share;

/// What came of one.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Measured {
    pub contender: String,
    pub what: String,
    pub round: usize,
    pub requests: usize,
    pub p50_ms: f64,
    pub p95_ms: f64,
    pub p99_ms: f64,
    pub longest_ms: f64,
    pub unanswered: u64,
    pub failed: u64,
    pub wrong: u64,
    pub touched_mib: u64,
    pub touched_wrong: u64,
    pub touch_longest_s: f64,
    /// Guests that did not come round to say what they saw.
    pub lost: u64,
    /// Seconds until the guest that was started was up and had its data; `None` if it was not by the end.
    pub started_s: Option<f64>,
    pub swapped_in_mib: u64,
    pub swapped_out_mib: u64,
    pub compressed_mib: u64,
    /// Written to the swap device since the guests were limited; what is compressed and stays so is not.
    pub written_mib: u64,
    /// Most that was swapped out at once, compressed or not.
    pub out_mib: u64,
    /// Pages that came back one at a time, and how long one took.
    pub swap_ins: usize,
    pub swap_in_p50_ms: f64,
    pub swap_in_p95_ms: f64,
    pub swap_in_p99_ms: f64,
    /// In the second in which most came back from the device.
    pub swap_in_peak_mib_s: f64,
    /// Seconds until it was measured.
    pub setup_s: f64,
}

/// What could not be measured, and why.
#[derive(Clone, Debug, Serialize)]
pub struct Left {
    pub contender: String,
    pub what: String,
    pub round: usize,
    pub why: String,
    /// This host lacks something for it; else it failed.
    pub lacks: bool,
}

/// The value below which that part of sorted values lies.
pub fn quantile(sorted: &[f64], part: f64) -> f64 {
    let n = (sorted.len() as f64 * part) as usize;
    let at = sorted.get(n.min(sorted.len().saturating_sub(1)));
    at.copied().unwrap_or(0.0)
}

/// All of it.
pub fn tables(all: &[Measured], left: &[Left], seconds: u64) -> String {
    let mut text = format!(
        "All guests are asked without pauses; four fifths of the requests use {:.0} % of what each is assigned.\n\n",
        active_share(EACH) * 100.0
    );
    text += &answers(all);
    text += "\n";
    text += &swapping(all, seconds);
    for l in left {
        let how = if l.lacks { "not measured" } else { "failed" };
        text += &format!("\n{} (round {}): {how}: {}\n", l.what, l.round, l.why);
    }
    let goals = goals(all);
    if !goals.is_empty() {
        text += "\n| goal | asked for | measured | |\n| --- | --- | --- | --- |\n";
    }
    for g in goals {
        let met = if g.met { "met" } else { "**missed**" };
        text += &format!("| {} | {} | {} | {met} |\n", g.what, g.asked, g.measured);
    }
    text
}

fn answers(all: &[Measured]) -> String {
    let mut text = String::from(
        "| round | memory | requests | p50 ms | p95 ms | p99 ms | longest ms | not answered | pages looked at, MiB | longest MiB, s | guests that did not come round | one more guest up, s |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for m in all {
        let started = m
            .started_s
            .map_or("not by the end".to_owned(), |s| format!("{s:.0}"));
        text += &format!(
            "| {} | {} | {} | {:.0} | {:.0} | {:.0} | {:.0} | {} | {} | {:.1} | {} | {started} |\n",
            m.round,
            m.what,
            m.requests,
            m.p50_ms,
            m.p95_ms,
            m.p99_ms,
            m.longest_ms,
            m.unanswered + m.failed,
            m.touched_mib,
            m.touch_longest_s,
            m.lost,
        );
    }
    text
}

fn swapping(all: &[Measured], seconds: u64) -> String {
    let mut text = String::from(
        "| round | memory | one page back: p50 ms | p95 ms | p99 ms | of | swapped in, MiB/s | in its busiest second | swapped in / out, MiB | written since the limit, MiB | compressed, MiB | most out at once, MiB |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for m in all {
        text += &format!(
            "| {} | {} | {:.2} | {:.2} | {:.2} | {} | {:.1} | {:.1} | {} / {} | {} | {} | {} |\n",
            m.round,
            m.what,
            m.swap_in_p50_ms,
            m.swap_in_p95_ms,
            m.swap_in_p99_ms,
            m.swap_ins,
            m.swapped_in_mib as f64 / seconds.max(1) as f64,
            m.swap_in_peak_mib_s,
            m.swapped_in_mib,
            m.swapped_out_mib,
            m.written_mib,
            m.compressed_mib,
            m.out_mib,
        );
    }
    text
}

/// Something that was asked for, and what came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Goal {
    pub what: String,
    pub asked: String,
    pub measured: String,
    pub met: bool,
}

/// Of the rounds of a contender the middle one.
fn medians(all: &[Measured], of: impl Fn(&Measured) -> f64) -> BTreeMap<&str, f64> {
    let mut each: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for m in all {
        each.entry(&m.contender).or_default().push(of(m));
    }
    let middle = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        quantile(&values, 0.5)
    };
    each.into_iter().map(|(c, v)| (c, middle(v))).collect()
}

/// MiB a second at which pages come back: as seen, or one after the other, whichever is more.
fn rate(m: &Measured) -> f64 {
    let one_by_one = match m.swap_in_p50_ms > 0.0 {
        true => 1e3 / m.swap_in_p50_ms / 256.0,
        false => 0.0,
    };
    m.swap_in_peak_mib_s.max(one_by_one)
}

/// What was asked for, as far as who it compares was measured.
pub fn goals(all: &[Measured]) -> Vec<Goal> {
    let p99 = medians(all, |m| m.p99_ms);
    let longest = medians(all, |m| m.longest_ms.max(m.touch_longest_s * 1e3));
    let writes = [
        (
            "written to swap meanwhile",
            medians(all, |m| m.swapped_out_mib as f64),
        ),
        (
            "written to swap since the limit",
            medians(all, |m| m.written_mib as f64),
        ),
    ];
    let out = medians(all, |m| m.out_mib as f64);
    let rate = medians(all, rate);
    let mut goals = Vec::new();
    let flashes = ["flash", "zswap", "balloons", "controller"];
    for id in flashes {
        if let (Some(disk), Some(flash)) = (p99.get("disk"), p99.get(id)) {
            goals.push(Goal {
                what: format!("p99 of answers, {id} / disk"),
                asked: "at most 0.10".into(),
                measured: format!("{flash:.0} / {disk:.0} ms = {:.3}", flash / disk.max(1e-9)),
                met: *flash <= disk * 0.1,
            });
        }
    }
    for id in flashes {
        let (Some(ram), Some(one)) = (longest.get("ram"), longest.get(id)) else {
            continue;
        };
        let (out, rate) = (out.get(id).unwrap_or(&0.0), rate.get(id).unwrap_or(&0.0));
        // Where nothing came back from the device nothing may be waited for.
        let back = if *rate > 0.0 { out / rate } else { 0.0 };
        let (beyond, may) = ((one - ram) / 1e3, 1.0 + back);
        goals.push(Goal {
            what: format!("longest stall beyond that with enough RAM, {id}"),
            asked: format!("at most 1 s + {out:.0} MiB / {rate:.0} MiB/s = {may:.1} s"),
            measured: format!("{beyond:.1} s"),
            met: beyond <= may,
        });
    }
    for (what, written) in writes {
        let (Some(without), Some(with)) = (written.get("flash"), written.get("zswap")) else {
            continue;
        };
        goals.push(Goal {
            what: format!("{what}, with compression / without"),
            asked: "at most 0.50".into(),
            measured: format!(
                "{with:.0} / {without:.0} MiB = {:.2}",
                with / without.max(1e-9)
            ),
            met: *with <= without * 0.5,
        });
    }
    let answers = medians(all, |m| {
        m.requests as f64 - (m.unanswered + m.failed) as f64
    });
    for id in flashes {
        if let (Some(ram), Some(one)) = (answers.get("ram"), answers.get(id)) {
            goals.push(Goal {
                what: format!("answers, {id} / enough RAM"),
                asked: "at least 0.90".into(),
                measured: format!("{one:.0} / {ram:.0} = {:.2}", one / ram.max(1e-9)),
                met: *one >= ram * 0.9,
            });
        }
    }
    if let (Some(alone), Some(ordered)) = (p99.get("flash"), p99.get("controller")) {
        goals.push(Goal {
            what: "p99 of answers, the controller / swap on flash alone".into(),
            asked: "below 1".into(),
            measured: format!("{:.2}", ordered / alone.max(1e-9)),
            met: ordered < alone,
        });
    }
    goals
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(contender: &str, p99_ms: f64, longest_ms: f64, written_mib: u64) -> Measured {
        Measured {
            contender: contender.into(),
            requests: 1000,
            p99_ms,
            longest_ms,
            written_mib,
            swapped_out_mib: written_mib,
            out_mib: 100,
            swap_in_peak_mib_s: 50.0,
            ..Measured::default()
        }
    }

    #[test]
    fn what_was_asked_for_is_judged_by_who_it_compares() {
        let met = |all: &[Measured]| goals(all).iter().map(|g| g.met).collect::<Vec<_>>();
        let ram = one("ram", 10.0, 100.0, 0);
        let disk = one("disk", 5000.0, 20_000.0, 900);
        assert_eq!(met(&[ram.clone(), disk.clone()]), [true; 0]);
        // 100 MiB at 50 MiB/s and a second: three of them.
        let mut flash = one("flash", 500.0, 3100.0, 800);
        flash.requests = 900;
        assert_eq!(
            met(&[ram.clone(), disk.clone(), flash.clone()]),
            [true, true, true]
        );
        let mut slow = one("flash", 501.0, 3101.0, 800);
        slow.unanswered = 101;
        assert_eq!(met(&[ram, disk, slow]), [false, false, false]);
        let zswap = one("zswap", 1.0, 1.0, 400);
        assert_eq!(met(&[flash.clone(), zswap]), [true, true]);
        let zswap = one("zswap", 1.0, 1.0, 401);
        assert_eq!(met(&[flash.clone(), zswap]), [false, false]);
        assert_eq!(
            met(&[flash.clone(), one("controller", 499.0, 1.0, 1)]),
            [true]
        );
        assert_eq!(met(&[flash, one("controller", 500.0, 1.0, 1)]), [false]);
    }

    #[test]
    fn how_fast_pages_come_back_is_what_was_seen_or_one_after_the_other() {
        let mut m = one("flash", 0.0, 0.0, 0);
        assert_eq!(rate(&m), 50.0);
        m.swap_in_p50_ms = 0.0390625;
        assert_eq!(rate(&m), 100.0);
    }

    #[test]
    fn of_several_rounds_the_middle_one_counts() {
        let all = [1.0, 9.0, 2.0].map(|p99| one("flash", p99, 0.0, 0));
        assert_eq!(medians(&all, |m| m.p99_ms)["flash"], 2.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
