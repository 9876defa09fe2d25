//! `hearth disk scrub`: beginning one, watching it, and what it has found.

use std::time::Instant;

use hearth_daemon::api::types::{DiskInfo, MirrorUpkeep, ScrubInfo, ScrubSet, Undecided};
use hearth_daemon::client::{Client, disk_path};
use hearth_daemon::error::Error;
use hearth_daemon::progress::human_seconds;
use hearth_daemon::size::human;
use hearth_fault::Fault;

use super::leg_name;
use crate::args::{DiskScrub, Global};
use crate::follow::follow;
use crate::interrupt::Interrupt;
use crate::table::plain;
use crate::{Failure, Outcome, print_json};

pub(super) fn run(global: &Global, client: &Client, args: &DiskScrub) -> Outcome {
    let set = ScrubSet {
        begin: !args.cancel && !args.show && args.prefer.is_none() && args.every.is_none(),
        anew: args.anew,
        cancel: args.cancel,
        prefer: args.prefer.as_deref().map(leg_name).transpose()?,
        rate: args.rate.map(|rate| rate.0),
        every_days: args.every,
    };
    let before = match set.begin || set.prefer.is_some() {
        true => scrub_of(&client.get(&disk_path(&args.name, ""))?),
        false => None,
    };
    let interrupt = Interrupt::watch();
    let info: DiskInfo = match args.show {
        true => client.get(&disk_path(&args.name, ""))?,
        false => client.post(&disk_path(&args.name, "/scrub"), &set)?,
    };
    let waits = (set.begin || set.prefer.is_some()) && !args.no_wait;
    if !waits {
        return found(global, &info, args.show);
    }
    let name = plain(&args.name);
    let leave = || {
        Failure::Interrupted(Fault::new(
            format!("the scrub of {name} goes on"),
            format!(
                "`hearth disk scrub {name} --show` tells how far it is, and --cancel calls it off"
            ),
        ))
    };
    let mut pace = None;
    let decides = set.prefer.is_some();
    let info = follow(global, &interrupt, leave, |line| {
        let info: DiskInfo = client.get(&disk_path(&args.name, ""))?;
        let Some(scrub) = scrub_of(&info) else {
            return Ok(None);
        };
        if decides {
            // Deciding what is open has no progress of its own; it is over when it says something else.
            let same = |b: &ScrubInfo| b.ended == scrub.ended && b.undecided == scrub.undecided;
            return Ok((!before.as_ref().is_some_and(same)).then_some(info));
        }
        line.show(|| format!("{name}: {}", progress(&scrub, info.size, &mut pace)));
        Ok((!scrub.active).then_some(info))
    })?;
    found(global, &info, true)
}

fn scrub_of(info: &DiskInfo) -> Option<ScrubInfo> {
    info.upkeep.as_ref()?.scrub.clone()
}

fn progress(scrub: &ScrubInfo, size: u64, pace: &mut Option<(Instant, u64)>) -> String {
    let (since, from) = *pace.get_or_insert_with(|| (Instant::now(), scrub.at));
    let speed = scrub.at.saturating_sub(from) as f64 / since.elapsed().as_secs_f64().max(0.1);
    let left = size.saturating_sub(scrub.at);
    let time = match speed >= 1.0 {
        true => format!(", {} left", human_seconds(left as f64 / speed)),
        false => String::new(),
    };
    format!(
        "{} of {} compared, {}/s{time}",
        human(scrub.at.min(size)),
        human(size),
        human(speed as u64)
    )
}

/// What a scrub has found, in a sentence.
fn sentence(scrub: &ScrubInfo, size: u64) -> String {
    let mut text = match (scrub.active, scrub.called_off) {
        (true, _) => format!("{} of {} compared", human(scrub.at.min(size)), human(size)),
        (_, true) => format!(
            "called off at {} of {}",
            human(scrub.at.min(size)),
            human(size)
        ),
        _ => format!("{} compared", human(scrub.checked)),
    };
    if scrub.partial > 0 {
        text.push_str(&format!(
            ", {} of that not on all legs",
            human(scrub.partial)
        ));
    }
    match scrub.repairs {
        0 if scrub.undecided_all == 0 && scrub.unread == 0 => text.push_str(", all the same"),
        0 => {}
        n => text.push_str(&format!(
            ", {n} places repaired ({})",
            human(scrub.repaired)
        )),
    }
    if scrub.undecided_all > 0 {
        text.push_str(&format!(", {} places undecided", scrub.undecided_all));
    }
    if scrub.unread > 0 {
        text.push_str(&format!(", {} that no leg can read", human(scrub.unread)));
    }
    text
}

fn place(place: &Undecided) -> String {
    let legs: Vec<String> = place
        .legs
        .iter()
        .map(|leg| format!("{} {:08x}", plain(&leg.leg), leg.sum))
        .collect();
    let what = match place.cached {
        true => "the cache has something else than the legs",
        false => "the legs differ",
    };
    format!(
        "{what}: {} bytes at offset {} ({})",
        place.length,
        place.offset,
        legs.join(", ")
    )
}

/// When a mirror is scrubbed by itself.
fn interval(days: u32) -> String {
    match days {
        0 => "only when asked for".to_owned(),
        1 => "every day".to_owned(),
        days => format!("every {days} days"),
    }
}

/// Lines of `hearth disk show`.
pub(super) fn lines(upkeep: &MirrorUpkeep, size: u64) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    match (upkeep.paused, upkeep.rate) {
        (true, _) => lines.push(("copying", "paused".to_owned())),
        (_, 0) => {}
        (_, rate) => lines.push(("copying", format!("at most {}/s", human(rate)))),
    }
    if let Some(scrub) = &upkeep.scrub {
        lines.push(("scrub", sentence(scrub, size)));
    }
    lines.push(("scrubs", interval(upkeep.scrub_every_days)));
    lines
}

/// Says what came of a scrub. Something undecided is an error: somebody has to see to it.
fn found(global: &Global, info: &DiskInfo, told: bool) -> Outcome {
    let scrub = scrub_of(info);
    if global.json {
        print_json(info)?;
    } else {
        let name = plain(&info.name);
        match &scrub {
            Some(scrub) => println!("disk {name}: {}", sentence(scrub, info.size)),
            None => println!("disk {name}: never scrubbed"),
        }
        for at in scrub.iter().flat_map(|s| &s.undecided) {
            println!("{}", place(at));
        }
        if let Some(upkeep) = &info.upkeep {
            println!("scrubbed {}", interval(upkeep.scrub_every_days));
        }
    }
    let Some(scrub) = scrub.filter(|s| told && !s.active) else {
        return Ok(());
    };
    if scrub.undecided.iter().any(|u| !u.cached) {
        return Err(Error::conflict(
            format!(
                "legs of {} differ in {} places, and nothing tells which one is right",
                info.name, scrub.undecided_all
            ),
            format!(
                "look at what they hold there; `hearth disk scrub {} --prefer LEG` makes the others as that leg is",
                info.name
            ),
        )
        .into());
    }
    if scrub.unread > 0 {
        return Err(Error::conflict(
            format!("no leg of {} can read {} bytes", info.name, scrub.unread),
            "restore what lies there from a backup, and replace the legs",
        )
        .into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_often_a_mirror_is_scrubbed_is_always_said() {
        let said = |days| {
            let upkeep = MirrorUpkeep {
                rate: 0,
                paused: false,
                scrub_rate: 0,
                scrub_every_days: days,
                scrub: None,
            };
            let lines = lines(&upkeep, 4096);
            let line = lines.into_iter().find(|(key, _)| *key == "scrubs");
            line.expect("it is said").1
        };
        assert_eq!(said(7), "every 7 days");
        assert_eq!(said(1), "every day");
        assert_eq!(said(0), "only when asked for");
    }
}
