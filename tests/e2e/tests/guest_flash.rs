//! A guest in QEMU on disks whose flash returns errors, hangs, vanishes, is discarded as a whole, or comes back as it was, under fio that
//! verifies what it wrote. Where the design says so the guest sees no error: past the write cache, with nothing dirty on the flash
//! when it fails, and with everything on two devices.

mod failing;

use anyhow::{Context, Result, anyhow, ensure};
use failing::{Fault, KINDS, Subject};
use hearth_rig::daemon::path;
use hearth_rig::machine::{GUEST_LIMIT, Job, Machine, Plan, copy_root};
use hearth_rig::{Hearth, mounted, wait};

/// Bytes that have to be written before something happens, and after it.
const BETWEEN: u64 = 512 << 10;

/// One guest with a disk of each kind, each served by a daemon of its own.
struct Lab {
    guest: Machine,
    subjects: Vec<Subject>,
    loads: Vec<Option<Job>>,
    /// Serves the guest's root, and does not fail.
    base: Hearth,
}

impl Lab {
    /// `None`, with a word, where no device can be made to fail.
    fn new(test: &str) -> Result<Option<Lab>> {
        if let Some(missing) = mounted::missing() {
            println!("SKIPPED guest_flash: {test}: no {missing}");
            return Ok(None);
        }
        let subjects = KINDS.map(Subject::new).into_iter();
        let subjects: Vec<Subject> = subjects.collect::<Result<_>>()?;
        let base = Hearth::serving("160M")?;
        let root = base.dir().join("root.img");
        copy_root(&root)?;
        base.add("root", path(&root), &[])?;
        let mut plan = Plan::new(1).disk(&base, "root", "vhost-user")?;
        for subject in &subjects {
            plan = plan.disk(&subject.hearth, "d", "vhost-user")?;
        }
        let mut guest = Machine::boot(base.dir(), "f", &plan)?;
        guest.forget_kernel_log()?;
        guest.run("rm -f /run/stop")?;
        let loads = subjects.iter().map(|_| None).collect();
        Ok(Some(Lab {
            guest,
            subjects,
            loads,
            base,
        }))
    }

    /// fio on the disk of this number, run after run.
    fn begin(&mut self, number: usize) -> Result<()> {
        let device = device(number);
        let fio = fio(&device);
        let load = self.guest.start(&format!(
            "runs=0; while [ ! -e /run/stop ]; do \
             {fio} >/run/{device}.out 2>&1 || {{ cat /run/{device}.out; exit 1; }}; \
             runs=$((runs+1)); done; echo $runs"
        ))?;
        self.loads[number] = Some(load);
        Ok(())
    }

    /// Waits until something is so of all disks, under loads that go on.
    fn wait(&mut self, what: &str, is: impl Fn(usize, &Subject) -> bool) -> Result<()> {
        let waited = wait::until(what, GUEST_LIMIT, || {
            for load in self.loads.iter().flatten() {
                if let Ok(true) = self.guest.has_ended(load) {
                    return Some(Err(anyhow!("{what}: a load has ended")));
                }
            }
            let mut all = self.subjects.iter().enumerate();
            all.all(|(n, s)| is(n, s)).then_some(Ok(()))
        });
        let outcome = waited.and_then(|outcome| outcome);
        let Err(e) = outcome else { return Ok(()) };
        let mut said = String::new();
        for (subject, load) in self.subjects.iter().zip(&self.loads) {
            let Some(load) = load else { continue };
            if self.guest.has_ended(load)? {
                let answer = self.guest.wait(load)?;
                said += &format!(
                    "{:?}: {}\n{}\n",
                    subject.kind,
                    answer.text,
                    subject.hearth.log()
                );
            }
        }
        Err(e.context(said).context(self.guest.run("dmesg | tail -20")?))
    }

    /// Waits until all have gone on.
    fn progress(&mut self) -> Result<()> {
        let written = |s: &Subject| s.written();
        let from: Vec<u64> = self.subjects.iter().map(written).collect::<Result<_>>()?;
        let running: Vec<bool> = self.loads.iter().map(Option::is_some).collect();
        self.wait("the guest goes on", |n, subject| {
            !running[n] || written(subject).is_ok_and(|now| now >= from[n] + BETWEEN)
        })
    }

    /// All loads go on, a device of each fails, and nobody in the guest sees anything.
    fn fails(&mut self, fault: Fault) -> Result<()> {
        for number in 0..KINDS.len() {
            match KINDS[number].has_to_be_clean() {
                false => self.begin(number)?,
                true => {
                    let once = fio(&device(number));
                    self.guest.run(&once)?;
                }
            }
        }
        self.progress()?;
        for number in 0..KINDS.len() {
            let clean = KINDS[number].has_to_be_clean();
            let subject = &mut self.subjects[number];
            if clean {
                subject.becomes_clean()?;
            }
            subject.happens(fault)?;
            if clean {
                self.begin(number)?;
            }
        }
        if fault != Fault::Trim {
            self.wait("it is noticed", |_, subject| subject.has_noticed())?;
        }
        self.progress()
    }

    /// The loads end, and have seen nothing.
    fn end(mut self) -> Result<()> {
        self.guest.run("touch /run/stop")?;
        for (subject, load) in self.subjects.iter().zip(&self.loads) {
            let load = load.as_ref().context("it was never begun")?;
            let runs = self.guest.wait_ok(load);
            let runs = runs.with_context(|| format!("{:?}", subject.kind))?;
            ensure!(runs.trim().parse::<u64>()? >= 1, "fio ran {runs} times");
        }
        self.guest.no_disk_errors()?;
        ensure!(self.guest.qmp.status()? == "running");
        let Lab {
            guest,
            subjects,
            mut base,
            ..
        } = self;
        guest.shut_down()?;
        for subject in subjects {
            let kind = subject.kind;
            subject.ends().with_context(|| format!("{kind:?}"))?;
        }
        base.stop().map(drop)
    }
}

/// What the guest calls a disk. The first one is its root.
fn device(number: usize) -> String {
    format!("vd{}", char::from(b'b' + number as u8))
}

fn fio(device: &str) -> String {
    format!(
        "fio --direct=1 --ioengine=libaio --iodepth=4 --rw=randrw --rwmixread=40 --bs=4k --size=24m \
         --io_size=2m --verify=crc32c --verify_backlog=64 --verify_fatal=1 --verify_state_save=0 \
         --randrepeat=0 --thread --name={device} --filename=/dev/{device} --fsync=16"
    )
}

fn nobody_notices(fault: Fault) -> Result<()> {
    let Some(mut lab) = Lab::new(&format!("{fault:?}"))? else {
        return Ok(());
    };
    lab.fails(fault)?;
    lab.end()
}

#[test]
fn of_errors() -> Result<()> {
    nobody_notices(Fault::Error)
}

#[test]
fn of_a_device_that_hangs() -> Result<()> {
    nobody_notices(Fault::Hang)
}

#[test]
fn of_a_device_that_is_discarded() -> Result<()> {
    nobody_notices(Fault::Trim)
}

/// Nor that it is back later, with what it had when it vanished, and the daemon is started anew: that is too old.
#[test]
fn of_a_device_that_vanishes_and_comes_back_old() -> Result<()> {
    let Some(mut lab) = Lab::new("a device that comes back")? else {
        return Ok(());
    };
    lab.fails(Fault::Vanish)?;
    for subject in &mut lab.subjects {
        subject.device_is_back()?;
    }
    lab.progress()?;
    for subject in lab.subjects.iter().filter(|s| s.kind.twice.is_some()) {
        ensure!(
            subject.has_noticed(),
            "what is too old is used: {:?}",
            subject.kind
        );
    }
    lab.end()
}
