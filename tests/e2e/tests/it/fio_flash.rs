//! fio verifies what it wrote while the flash beneath returns errors, vanishes or is discarded as a whole. Where the design says
//! so it sees no error: past the write cache, with nothing dirty on the flash when it fails, and with everything on two
//! devices.

use crate::failing::{Fault, KINDS, Subject};
use anyhow::{Context, Result, bail, ensure};
use hearth_rig::clients::{have, run_ok};
use hearth_rig::{mounted, wait};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest wait for what comes by itself.
const LIMIT: Duration = Duration::from_secs(120);
/// Bytes that have to be written before something happens, and after it.
const BETWEEN: u64 = 4 << 20;

/// One run of fio after the other, until it is told to end.
struct Load {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<u32>>>,
}

impl Load {
    fn of(subject: &Subject) -> Load {
        let uri = format!("--uri={}", subject.hearth.uri("d"));
        let dir = PathBuf::from(subject.hearth.dir());
        let end = Arc::new(AtomicBool::new(false));
        let over = end.clone();
        let thread = std::thread::spawn(move || {
            let mut runs = 0;
            while !over.load(Ordering::Relaxed) {
                once(&uri, &dir)?;
                runs += 1;
            }
            Ok(runs)
        });
        Load {
            end,
            thread: Some(thread),
        }
    }

    /// Waits for something while it goes on.
    fn until(&mut self, what: &str, subject: &Subject, is: impl Fn() -> bool) -> Result<()> {
        let ended =
            |thread: &Option<JoinHandle<_>>| thread.as_ref().is_none_or(JoinHandle::is_finished);
        wait::until(what, LIMIT, || (is() || ended(&self.thread)).then_some(()))
            .with_context(|| subject.hearth.log())?;
        if ended(&self.thread) {
            self.ends().with_context(|| subject.hearth.log())?;
            bail!("{what}: fio has ended");
        }
        Ok(())
    }

    fn progress(&mut self, subject: &Subject) -> Result<()> {
        let from = subject.written()?;
        self.until("fio goes on", subject, || {
            subject.written().is_ok_and(|now| now >= from + BETWEEN)
        })
    }

    fn ends(&mut self) -> Result<u32> {
        self.end.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("it has ended")?;
        thread.join().ok().context("fio's thread has panicked")?
    }
}

/// One run of fio, which must find all as it wrote it.
fn once(uri: &str, dir: &std::path::Path) -> Result<String> {
    let args = [
        "--ioengine=nbd",
        uri,
        "--output-format=json",
        "--iodepth=16",
        "--name=verify",
        "--rw=randrw",
        "--bsrange=4k-64k",
        "--blockalign=4k",
        "--size=48m",
        "--io_size=16m",
        "--randrepeat=0",
        "--fsync=32",
        "--verify=crc32c",
        "--verify_backlog=128",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--do_verify=1",
    ];
    run_ok("fio", &args, dir)
}

/// Under each disk whose guest may not notice.
fn nobody_notices(fault: Fault) -> Result<()> {
    if !have(&format!("fio_flash: {fault:?}"), &["fio"]) {
        return Ok(());
    }
    if let Some(missing) = mounted::missing() {
        println!("SKIPPED fio_flash: {fault:?}: no {missing}");
        return Ok(());
    }
    for kind in KINDS {
        let mut subject = Subject::new(kind)?;
        let mut happens = || -> Result<()> {
            if kind.has_to_be_clean() {
                let uri = format!("--uri={}", subject.hearth.uri("d"));
                once(&uri, subject.hearth.dir())?;
                subject.becomes_clean()?;
                subject.happens(fault)?;
            }
            let mut load = Load::of(&subject);
            load.progress(&subject)?;
            if !kind.has_to_be_clean() {
                subject.happens(fault)?;
            }
            if fault != Fault::Trim {
                load.until("it is noticed", &subject, || subject.has_noticed())?;
            }
            load.progress(&subject)?;
            ensure!(load.ends()? > 0);
            Ok(())
        };
        happens().with_context(|| format!("{kind:?}"))?;
        let log = subject.hearth.log();
        subject
            .ends()
            .context(log)
            .with_context(|| format!("{kind:?}"))?;
    }
    Ok(())
}

#[test]
fn of_errors() -> Result<()> {
    nobody_notices(Fault::Error)
}

#[test]
fn of_a_device_that_vanishes() -> Result<()> {
    nobody_notices(Fault::Vanish)
}

#[test]
fn of_a_device_that_is_discarded() -> Result<()> {
    nobody_notices(Fault::Trim)
}
