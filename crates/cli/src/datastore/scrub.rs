//! `hearth datastore scrub`: starting a scrub of two directories, its progress and its result.

use hearth_daemon::api::datastores::{DatastoreInfo, TreeDifference, TreeScrub};
use hearth_daemon::api::types::ScrubSet;
use hearth_daemon::client::{Client, datastore_path};
use hearth_daemon::error::Error;
use hearth_daemon::size::human;
use hearth_fault::Fault;

use super::absolute;
use crate::args::{DatastoreScrub, Global};
use crate::follow::follow;
use crate::interrupt::Interrupt;
use crate::table::plain;
use crate::{Failure, Outcome, print_json};

pub(super) fn run(global: &Global, client: &Client, args: &DatastoreScrub) -> Outcome {
    let begins = !args.cancel && !args.show && args.prefer.is_none() && args.every.is_none();
    let prefer = args.prefer.as_deref().map(absolute).transpose()?;
    let set = ScrubSet {
        begin: begins,
        anew: args.anew,
        cancel: args.cancel,
        prefer: prefer.map(|path| path.display().to_string()),
        rate: args.rate.map(|rate| rate.0),
        every_days: args.every,
    };
    let interrupt = Interrupt::watch();
    let info: DatastoreInfo = match args.show {
        true => client.get(&datastore_path(&args.name, ""))?,
        false => client.post(&datastore_path(&args.name, "/scrub"), &set)?,
    };
    if !begins || args.no_wait {
        return report(global, &info, args.show || args.prefer.is_some());
    }
    let name = plain(&args.name);
    let leave = || {
        Failure::Interrupted(Fault::new(
            format!("the scrub of {name} continues"),
            format!(
                "`hearth datastore scrub {name} --show` prints its progress, and --cancel cancels it"
            ),
        ))
    };
    let info = follow(global, &interrupt, leave, |line| {
        let info: DatastoreInfo = client.get(&datastore_path(&args.name, ""))?;
        let Some(scrub) = &info.scrub else {
            return Ok(Some(info));
        };
        line.show(|| format!("{name}: {} compared", human(scrub.checked)));
        Ok((!scrub.active).then_some(info))
    })?;
    report(global, &info, true)
}

/// The result of a scrub in a sentence.
pub(super) fn sentence(scrub: &TreeScrub) -> String {
    if scrub.began == 0 {
        return "never scrubbed".to_owned();
    }
    let mut text = format!("{} compared", human(scrub.checked));
    match (scrub.active, scrub.called_off) {
        (true, _) => text.push_str(" so far"),
        (_, true) => text.push_str(", cancelled"),
        _ => {}
    }
    if scrub.repairs > 0 {
        let repaired = human(scrub.repaired);
        text.push_str(&format!(", {} places repaired ({repaired})", scrub.repairs));
    }
    if scrub.undecided > 0 {
        text.push_str(&format!(", {} places differ", scrub.undecided));
    }
    if scrub.unread > 0 {
        text.push_str(&format!(", {} not readable", human(scrub.unread)));
    }
    if scrub.repairs == 0 && scrub.undecided == 0 && scrub.unread == 0 {
        text.push_str(", all the same");
    }
    text
}

fn line(place: &TreeDifference) -> String {
    let path = plain(&place.path);
    match place.what.as_str() {
        "names" => format!("{path}: names in the directory, its owner or mode"),
        "attributes" => format!("{path}: length, owner or mode"),
        what => {
            let what = match what {
                "cached" => "the cache differs from both directories",
                _ => "data",
            };
            let TreeDifference { offset, length, .. } = place;
            format!("{path}: {what}, {length} bytes at offset {offset}")
        }
    }
}

/// Prints the result of a scrub. An undecided place is an error: an administrator has to decide.
fn report(global: &Global, info: &DatastoreInfo, is_final: bool) -> Outcome {
    let name = plain(&info.name);
    if global.json {
        print_json(info)?;
    } else if let Some(scrub) = &info.scrub {
        println!("datastore {name}: {}", sentence(scrub));
        for place in &scrub.differences {
            println!("{}", line(place));
        }
        match scrub.every_days {
            0 => println!("scrubbed on request only"),
            days => println!("scrubbed every {days} days"),
        }
    }
    let scrub = info.scrub.as_ref();
    let scrub = scrub.filter(|scrub| is_final && !scrub.active && scrub.undecided > 0);
    let Some(scrub) = scrub else { return Ok(()) };
    Err(Error::conflict(
        format!(
            "the directories of datastore {name} differ in {} places and nothing shows which one is right",
            scrub.undecided
        ),
        format!(
            "compare the listed files; `hearth datastore scrub {name} --prefer DIR` makes the other directory the same there"
        ),
    )
    .into())
}
