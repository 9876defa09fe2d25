//! `hearth rescue`: what is dirty on flash that nobody serves.

use std::time::Duration;

use hearth_daemon::error::Error;
use hearth_daemon::rescue::{Found, Range, Report, Rescue, To};
use hearth_daemon::size::human;
use serde::Serialize;

use crate::args::{self, Global};
use crate::interrupt::Interrupt;
use crate::status::StatusLine;
use crate::table::{Table, plain};
use crate::{Failure, Outcome, print_json};

/// Ranges that are shown to people; `--json` has more.
const SHOWN_MAX: usize = 20;

#[derive(Serialize)]
struct Listed {
    disks: Vec<Found>,
    doubts: Vec<String>,
}

pub fn run(global: &Global, args: &args::Rescue) -> Outcome {
    let state_dir = args
        .state_dir
        .clone()
        .unwrap_or_else(hearth_daemon::rundir::default_state_dir);
    let rescue = Rescue::open(&args.flash, &state_dir)?;
    let to = match (&args.to, args.onto.as_slice()) {
        (Some(file), _) => To::File(file.clone()),
        (None, []) => return list(global, &rescue),
        (None, origins) => To::Onto(origins.to_vec()),
    };
    let disk = args.disk.as_deref().unwrap_or_default();
    let interrupt = Interrupt::watch();
    let mut line = StatusLine::new(!global.json).quiet_for(Duration::from_secs(1));
    let written = rescue.write(disk, &to, args.force, &mut |done, total| {
        line.show(|| format!("writing: {} of {}", human(done), human(total)));
        !interrupt.hit()
    });
    line.end();
    let report = written.map_err(|e| {
        if interrupt.hit() {
            Failure::Interrupted(e.into())
        } else {
            e.into()
        }
    })?;
    told(global, &report)?;
    if report.untrusted_bytes > 0 || !report.doubts.is_empty() {
        let what = match report.untrusted_bytes {
            0 => {
                "everything dirty that was found was written, but not all of it can be vouched for"
                    .to_owned()
            }
            bytes => format!("{} could not be trusted and were not written", human(bytes)),
        };
        return Err(Error::unavailable(
            what,
            "compare the ranges above with a backup, or check the file systems in it before use",
        )
        .into());
    }
    Ok(())
}

fn list(global: &Global, rescue: &Rescue) -> Outcome {
    let (disks, doubts) = (rescue.disks(), rescue.doubts().to_vec());
    if global.json {
        return print_json(&Listed { disks, doubts });
    }
    let mut table = Table::new(&["DISK", ">SIZE", ">DIRTY", "ORIGIN"]);
    for disk in &disks {
        let left = if disk.left {
            "  (may be newer than the flash)"
        } else {
            ""
        };
        let origin = disk.file.as_ref().or(disk.lost.as_ref());
        table.row([
            plain(disk.path.as_ref().unwrap_or(&disk.disk)),
            human(disk.size),
            human(disk.dirty),
            format!("{}{left}", plain(origin.unwrap_or(&disk.origin))),
        ]);
    }
    print!("{}", table.render());
    for doubt in &doubts {
        println!("doubt: {}", plain(doubt));
    }
    Ok(())
}

fn told(global: &Global, report: &Report) -> Outcome {
    if global.json {
        return print_json(report);
    }
    println!(
        "{} of disk {} written to {}, {} of it zeros",
        human(report.written),
        plain(&report.disk),
        plain(&report.to),
        human(report.zeros)
    );
    for doubt in &report.doubts {
        println!("doubt: {}", plain(doubt));
    }
    for Range { offset, len } in report.untrusted.iter().take(SHOWN_MAX) {
        println!("not trusted, not written: {len} bytes at offset {offset}");
    }
    if report.untrusted.len() > SHOWN_MAX || report.shortened {
        println!("there are more; --json lists them");
    }
    Ok(())
}
