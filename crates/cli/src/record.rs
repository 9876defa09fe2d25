//! `hearth trace record`: the daemon records, this starts, follows and ends it.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use hearth_daemon::api::types::DiskInfo;
use hearth_daemon::api::workload::{RecordStart, Recording};
use hearth_daemon::client::{Client, disk_path};
use hearth_daemon::error::Error;
use hearth_daemon::progress::human_seconds;
use hearth_daemon::size::human;
use hearth_fault::Fault;

use crate::args::{Global, TraceRecord};
use crate::interrupt::Interrupt;
use crate::table::plain;
use crate::{Outcome, print_json};

/// How often progress is asked for.
const POLL: Duration = Duration::from_millis(500);

/// A recording in one line.
pub fn sentence(r: &Recording) -> String {
    let mut text = format!(
        "{} requests in {} to {} ({})",
        r.records,
        human_seconds(r.seconds),
        plain(&r.file),
        human(r.bytes)
    );
    if r.given_up > 0 {
        text.push_str(&format!("; {} older ones given up for space", r.given_up));
    }
    if r.dropped > 0 {
        text.push_str(&format!(
            "; {} MISSING because the file was too slow",
            r.dropped
        ));
    }
    if let Some(error) = &r.error {
        let why = Fault::new(error, r.remedy.clone().unwrap_or_default());
        text.push_str(&format!("; it ended early: {}", plain(&why.to_string())));
    }
    text
}

pub fn run(global: &Global, args: &TraceRecord) -> Outcome {
    let client = Client::new(&global.dir());
    let Some(out) = args.out.as_ref().filter(|_| !args.stop) else {
        let ended: Recording = client.order(&disk_path(&args.name, "/recording/stop"))?;
        return end(global, &ended);
    };
    let file = std::path::absolute(out).map_err(|e| {
        Error::invalid(
            format!("the path {} cannot be made absolute: {e}", out.display()),
            "give an absolute path",
        )
    })?;
    let start = RecordStart {
        file: file
            .to_str()
            .ok_or_else(|| {
                Error::invalid(
                    format!("the path {} is not UTF-8", file.display()),
                    "choose another",
                )
            })?
            .to_owned(),
        seconds: args.duration,
        max_bytes: args.max_size.map(|s| s.0),
    };
    let interrupt = Interrupt::watch();
    let begun: Recording = client.post(&disk_path(&args.name, "/recording"), &start)?;
    if args.duration.is_none() {
        if global.json {
            return print_json(&begun);
        }
        println!(
            "recording disk {} to {}; end it with `hearth trace record {} --stop`",
            plain(&args.name),
            plain(&begun.file),
            plain(&args.name)
        );
        return Ok(());
    }
    let shown = !global.json && std::io::stderr().is_terminal();
    loop {
        let left = args.duration.unwrap_or(0.0);
        let wait = POLL.min(Duration::from_secs_f64(left));
        if interrupt.sleep(wait) {
            let ended: Recording = client.order(&disk_path(&args.name, "/recording/stop"))?;
            return end(global, &ended);
        }
        let info: DiskInfo = client.get(&disk_path(&args.name, ""))?;
        let recording = info.recording.ok_or_else(|| {
            Error::unavailable(
                format!("the recording of disk {} is gone", args.name),
                "see whether the daemon was restarted; the file holds what was recorded until then",
            )
        })?;
        if shown {
            std::eprint!("\r\x1b[K{}", crate::table::plain(&sentence(&recording)));
            let _ = std::io::stderr().flush();
        }
        if !recording.active {
            if shown {
                eprintln!();
            }
            return end(global, &recording);
        }
    }
}

fn end(global: &Global, recording: &Recording) -> Outcome {
    if global.json {
        return print_json(recording);
    }
    println!("recorded {}", sentence(recording));
    Ok(())
}
