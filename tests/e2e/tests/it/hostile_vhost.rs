//! A vhost-user front end that means harm, and the clients beside it.

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::guest::{DATA, Guest, How, kind};
use hearth_rig::{Hearth, wait};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(30);
const OK: u8 = 0;

fn served() -> Result<Hearth> {
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 8 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    Ok(hearth)
}

fn guest(hearth: &Hearth) -> Result<Guest> {
    Guest::connect(&hearth.vhost_socket("d"), 2, How::default())
        .with_context(|| format!("daemon's log:\n{}", hearth.log()))
}

/// Descriptors the daemon has open.
fn open_files(hearth: &Hearth) -> Result<usize> {
    let pid = hearth.pid().context("no daemon")?;
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

/// Every message with every number of descriptors: none stays open in the daemon.
#[test]
fn descriptors_that_come_with_messages_are_closed() -> Result<()> {
    let hearth = served()?;
    // Whatever is made with the first client is there now.
    let mut g = guest(&hearth)?;
    ensure!(g.request(0, kind::IN, 0, &[(DATA, 4096)])?.0 == OK);
    drop(g);
    let settled = |before: usize| {
        wait::until("all descriptors are closed", LIMIT, || {
            (open_files(&hearth).ok()? <= before).then_some(())
        })
    };
    let mut before = open_files(&hearth)?;
    wait::until("the first client is forgotten", LIMIT, || {
        let now = open_files(&hearth).ok()?;
        let same = now == before;
        before = now;
        same.then_some(())
    })?;
    let null = File::open("/dev/null")?;
    for code in 0..48u32 {
        for count in [0, 1, 2, 3, 8, 64] {
            let g = guest(&hearth)?;
            let fds = vec![null.as_raw_fd(); count];
            // A body that fits most messages; those that take none end the connection.
            for body in [&[][..], &[0; 8], &[0; 24]] {
                // The daemon may have had enough already.
                let _ = g.send(code, body, &fds);
            }
            drop(g);
        }
    }
    settled(before)?;
    // Message 21 is taken out of the stream by ourselves: too many, and one after the other.
    let pair = std::os::unix::net::UnixStream::pair()?;
    for round in 0..40 {
        let g = guest(&hearth)?;
        let count = if round % 2 == 0 { 2 } else { 8 };
        g.send(21, &[], &vec![pair.1.as_raw_fd(); count])?;
        g.wait_cut()?;
    }
    settled(before)?;
    let g = guest(&hearth)?;
    let with_client = open_files(&hearth)?;
    for _ in 0..200 {
        g.send(21, &[], &[pair.1.as_raw_fd()])?;
    }
    ensure!(g.capacity()? == 8 * MIB);
    settled(with_client)?;
    ensure!(!hearth.log().contains("panicked"), "{}", hearth.log());
    Ok(())
}

/// A call eventfd that is full and blocks holds up nobody but its client, and not beyond its life.
#[test]
fn a_call_that_blocks_ends_with_its_client() -> Result<()> {
    let hearth = served()?;
    for _ in 0..2 {
        let mut g = guest(&hearth)?;
        ensure!(g.request(0, kind::IN, 0, &[(DATA, 4096)])?.0 == OK);
        g.clog_calls()?;
        for q in 0..2 {
            for i in 0..4 {
                let at = DATA + 8192 * (4 * q + i);
                g.submit(q, kind::IN, 8 * i as u64, &[(at, 4096)])?;
                g.kick_anyway(q)?;
                // Answered in memory, whatever becomes of the call.
                wait::until("an answer", LIMIT, || g.used(q))?;
                // From now on the device is asked to call for each answer.
                g.want_call(q);
            }
        }
        // One more eventfd of that kind, given to a queue that runs.
        let full = EventFd::new(0)?;
        full.write(u64::MAX - 1)?;
        g.set_call(0, &full)?;
        let (memory, began) = (g.into_memory(), Instant::now());
        drop(memory);
        let mut next = guest(&hearth)?;
        ensure!(next.request(0, kind::IN, 0, &[(DATA, 4096)])?.0 == OK);
        ensure!(next.request(1, kind::IN, 8, &[(DATA, 4096)])?.0 == OK);
        ensure!(began.elapsed() < LIMIT / 2, "{:?}", began.elapsed());
    }
    Ok(())
}

/// Memory on a file system that is not the kernel's own is refused, with the reason in the log.
#[test]
fn memory_on_a_disk_is_refused() -> Result<()> {
    let hearth = served()?;
    let file = File::options()
        .read(true)
        .write(true)
        .open(hearth.origin("memory.img", 2 * MIB)?)?;
    refused(&hearth, &file, "memfd")?;
    // A device on a tmpfs is no memory either.
    let zero = File::options().read(true).write(true).open("/dev/zero")?;
    refused(&hearth, &zero, "no regular file")
}

fn refused(hearth: &Hearth, file: &File, reason: &str) -> Result<()> {
    let before = hearth.log().len();
    let g = guest(hearth)?;
    let told = g.share(file);
    ensure!(told.is_err(), "memory on a file was taken");
    drop(g);
    wait::until("the reason is logged", LIMIT, || {
        let log = hearth.log();
        (log[before..].contains("cut off") && log[before..].contains(reason)).then_some(())
    })
    .with_context(|| hearth.log()[before..].to_owned())?;
    let mut next = guest(hearth)?;
    ensure!(next.request(0, kind::IN, 0, &[(DATA, 4096)])?.0 == OK);
    Ok(())
}

/// A file system that answers nothing, not even what it is, holds up nobody: neither the next
/// client of the disk nor another disk's.
#[test]
fn memory_on_a_file_system_that_hangs_is_refused() -> Result<()> {
    let hearth = served()?;
    hearth.add("other", path(&hearth.origin("p.img", MIB)?), &[])?;
    let Some(hanging) = Hanging::mount(&hearth.dir().join("clients-hang"))? else {
        println!("SKIPPED a file system that hangs: mounting FUSE needs root and /dev/fuse");
        return Ok(());
    };
    // Closing it asks the program, too.
    let file = std::mem::ManuallyDrop::new(hanging.open()?);
    refused(&hearth, &file, "of type fuse")?;
    ensure!(hearth.connect("other")?.read(0, 4096)?.len() == 4096);
    ensure!(hearth.connect("d")?.read(0, 4096)?.len() == 4096);
    Ok(())
}

/// A FUSE mount of one file whose program answers only what opening it takes. Layout of the
/// messages: Linux's include/uapi/linux/fuse.h.
struct Hanging {
    at: std::ffi::CString,
    _device: File,
    answers: Option<std::thread::JoinHandle<()>>,
}

impl Hanging {
    fn mount(at: &std::path::Path) -> Result<Option<Hanging>> {
        File::create(at)?;
        let Ok(device) = File::options().read(true).write(true).open("/dev/fuse") else {
            return Ok(None);
        };
        let options = format!(
            "fd={},rootmode=100600,user_id=0,group_id=0",
            device.as_raw_fd()
        );
        let at = std::ffi::CString::new(path(at))?;
        let options = std::ffi::CString::new(options)?;
        // SAFETY: C strings that live across the call.
        let done = unsafe {
            libc::mount(
                c"hearth-clients".as_ptr(),
                at.as_ptr(),
                c"fuse".as_ptr(),
                libc::MS_NOSUID | libc::MS_NODEV,
                options.as_ptr().cast(),
            )
        };
        if done != 0 {
            return Ok(None);
        }
        let own = device.try_clone()?;
        let answers = Some(std::thread::spawn(move || answer_some(&own)));
        Ok(Some(Hanging {
            at,
            _device: device,
            answers,
        }))
    }

    fn open(&self) -> Result<File> {
        let at = self.at.to_str()?;
        Ok(File::options().read(true).write(true).open(at)?)
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        // MNT_FORCE aborts the connection, and with it whoever waits for an answer.
        // SAFETY: a C string that lives across the call.
        unsafe { libc::umount2(self.at.as_ptr(), libc::MNT_FORCE | libc::MNT_DETACH) };
        if let Some(answers) = self.answers.take() {
            let _ = answers.join();
        }
    }
}

fn answer_some(device: &File) {
    use std::io::{Read, Write};
    let mut raw = vec![0u8; 256 << 10];
    // Ends with the mount.
    while let Ok(n) = (&*device).read(&mut raw) {
        if n < 40 {
            return;
        }
        let word = |i: usize| u32::from_ne_bytes([raw[i], raw[i + 1], raw[i + 2], raw[i + 3]]);
        let mut body = match word(4) {
            // INIT: version, and everything else zero but the longest write.
            26 => {
                let mut body = vec![0u8; 64];
                body[..4].copy_from_slice(&7u32.to_ne_bytes());
                body[4..8].copy_from_slice(&31u32.to_ne_bytes());
                body[20..24].copy_from_slice(&4096u32.to_ne_bytes());
                body
            }
            // GETATTR: a regular file of 2 MiB, not to be remembered.
            3 => {
                let mut body = vec![0u8; 104];
                body[16..24].copy_from_slice(&1u64.to_ne_bytes());
                body[24..32].copy_from_slice(&(2 * MIB).to_ne_bytes());
                body[76..80].copy_from_slice(&0o100_600u32.to_ne_bytes());
                body[80..84].copy_from_slice(&1u32.to_ne_bytes());
                body
            }
            // OPEN.
            14 => vec![0u8; 16],
            _ => continue,
        };
        let mut reply = (16 + body.len() as u32).to_ne_bytes().to_vec();
        reply.extend_from_slice(&0i32.to_ne_bytes());
        reply.extend_from_slice(&raw[8..16]);
        reply.append(&mut body);
        let _ = (&*device).write_all(&reply);
    }
}
