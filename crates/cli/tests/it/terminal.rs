//! What is drawn on a terminal, on one of 80 columns and 24 rows: it fits, and the terminal is left as it was found.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::common::{Bench, until};

const COLUMNS: u16 = 80;
const ROWS: u16 = 24;

/// How a terminal is set, as far as programs change it.
#[derive(Debug, PartialEq)]
struct Set {
    modes: [libc::tcflag_t; 4],
    keys: [libc::cc_t; libc::NCCS],
}

struct Terminal {
    keyboard: File,
    line: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Terminal {
    fn new() -> Terminal {
        let size = libc::winsize {
            ws_row: ROWS,
            ws_col: COLUMNS,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let (mut master, mut line) = (-1, -1);
        // SAFETY: two valid out-pointers and a size that outlives the call; no name and no settings are asked for.
        let rc = unsafe {
            libc::openpty(
                &raw mut master,
                &raw mut line,
                std::ptr::null_mut(),
                std::ptr::null(),
                &raw const size,
            )
        };
        assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
        for fd in [master, line] {
            // SAFETY: both were just opened, and are kept from the children of this and other tests.
            let rc = unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
            assert_eq!(rc, 0);
        }
        // SAFETY: just opened, and nobody else's.
        let (keyboard, line) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(line)) };
        let shown: Arc<Mutex<Vec<u8>>> = Arc::default();
        let (mut screen, seen) = (keyboard.try_clone().unwrap(), shown.clone());
        let reader = std::thread::spawn(move || {
            let mut some = [0; 4096];
            // Fails when the last one who had the line open is gone.
            while let Ok(n @ 1..) = screen.read(&mut some) {
                seen.lock().unwrap().extend_from_slice(&some[..n]);
            }
        });
        Terminal {
            keyboard,
            line,
            shown,
            reader,
        }
    }

    /// Runs a command on it, as a shell does.
    fn run(&self, bench: &Bench, args: &[&str]) -> Child {
        let line = || self.line.try_clone().unwrap();
        let mut command = bench.command(args);
        command.stdin(line()).stdout(line()).stderr(line());
        // SAFETY: two system calls, which are allowed between fork and exec.
        unsafe {
            command.pre_exec(|| {
                if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        command.spawn().unwrap()
    }

    fn set(&self) -> Set {
        // SAFETY: all-zero bytes are a valid termios.
        let mut now: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: a descriptor of ours, and a valid out-pointer for the call.
        let rc = unsafe { libc::tcgetattr(self.line.as_raw_fd(), &raw mut now) };
        assert_eq!(rc, 0);
        Set {
            modes: [now.c_iflag, now.c_oflag, now.c_cflag, now.c_lflag],
            keys: now.c_cc,
        }
    }

    fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }

    /// All that was shown, when nobody is left who could show anything.
    fn end(self) -> String {
        drop(self.line);
        self.reader.join().unwrap();
        let shown = self.shown.lock().unwrap();
        String::from_utf8_lossy(&shown).into_owned()
    }
}

fn serving(disks: usize) -> Bench {
    let bench = Bench::serving();
    for n in 0..disks {
        let origin = bench.origin(&format!("o{n}.img"), 1 << 20, n as u64);
        let name = format!("web-{n}.department.example.org");
        bench.ok(&["disk", "add", &name, "--origin", &origin]);
    }
    bench
}

#[test]
fn top_leaves_the_terminal_as_it_was_however_it_ends() {
    let bench = serving(1);
    for how in ["q", "escape", "ctrl-c", "a signal"] {
        let terminal = Terminal::new();
        let before = terminal.set();
        let mut top = terminal.run(&bench, &["top"]);
        until("it is drawn, its keys included", || {
            let shown = terminal.shown();
            (shown.contains("web-0") && shown.contains("quit")).then_some(())
        });
        assert_ne!(terminal.set(), before, "{how}: keys come one by one");
        let mut keyboard = &terminal.keyboard;
        match how {
            "q" => keyboard.write_all(b"q").unwrap(),
            "escape" => keyboard.write_all(b"\x1b").unwrap(),
            "ctrl-c" => keyboard.write_all(b"\x03").unwrap(),
            // SAFETY: a signal to a child that was not waited for.
            _ => assert_eq!(unsafe { libc::kill(top.id() as i32, libc::SIGTERM) }, 0),
        }
        assert!(top.wait().unwrap().success(), "{how}");
        assert_eq!(terminal.set(), before, "{how}");
        let shown = terminal.end();
        // The screen that was there before is back, and so is the cursor.
        for (taken, given) in [("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")] {
            let (taken, given) = (shown.rfind(taken), shown.rfind(given));
            assert!(taken.is_some() && given > taken, "{how}: {shown:?}");
        }
    }
}

#[test]
fn top_needs_a_terminal_and_says_so() {
    let bench = serving(0);
    let told = bench.refused(&["top"]);
    assert!(
        told.contains("needs a terminal") && told.contains("top --json"),
        "{told}"
    );
}

#[test]
fn status_is_one_screen() {
    for disks in [0, 1, 40] {
        let bench = serving(disks);
        let terminal = Terminal::new();
        let mut status = terminal.run(&bench, &["status"]);
        assert!(status.wait().unwrap().success());
        let shown = terminal.end();
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines.len() < usize::from(ROWS), "{shown}");
        for line in &lines {
            assert!(
                line.chars().count() <= usize::from(COLUMNS),
                "{line:?} in {shown}"
            );
        }
        for part in ["health: ", "pool: ", "is it helping? ", "serving pool "] {
            assert!(shown.contains(part), "no {part:?} in {shown}");
        }
        assert_eq!(
            shown.contains("see `hearth disk list`"),
            disks == 40,
            "{shown}"
        );
        // A file gets names that are whole.
        let whole = bench.ok(&["status"]);
        assert_eq!(
            whole.contains("web-0.department.example.org"),
            disks > 0,
            "{whole}"
        );
        assert!(!whole.contains('…'), "{whole}");
    }
}
