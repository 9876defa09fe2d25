//! Pages of one process, swapped out and read back from outside.
//!
//! Out: the kernel takes advice about another process's memory (`process_madvise`), so an idle guest goes before the kernel picks
//! somebody itself. Back: one byte of each page that is out is read through the kernel (`process_vm_readv`), which
//! brings the page in as if the guest had looked at it.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use crate::kernel::PAGE;

/// Mappings below this are not a guest's memory, but what QEMU is made of.
const LEAST: u64 = 16 << 20;
/// Bytes of memory whose pages are looked up at once.
const STRETCH: u64 = 16 << 20;
/// Pages read with one call (the kernel takes 1024).
const BATCH: usize = 512;
/// In an entry of `pagemap`: the page is in memory, the page is swapped out.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;

/// Large mappings that can be written, private and without a file, or of memory that has none.
fn guest_memory(pid: u32) -> io::Result<Vec<(u64, u64)>> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    Ok(parse(&text))
}

fn parse(text: &str) -> Vec<(u64, u64)> {
    let one = |line: &str| {
        let mut words = line.split_whitespace();
        let (from, to) = words.next()?.split_once('-')?;
        let rights = words.next()?;
        let name = words.nth(3).unwrap_or_default();
        let from = u64::from_str_radix(from, 16).ok()?;
        let to = u64::from_str_radix(to, 16).ok()?;
        let memory = name.is_empty() || name.starts_with("/memfd:") || name.starts_with("[anon");
        let fits = rights.starts_with("rw") && memory && to.checked_sub(from)? >= LEAST;
        fits.then_some((from, to))
    };
    text.lines().filter_map(one).collect()
}

/// Stretches of memory from an address on, and then those before it.
fn from_there(all: &[(u64, u64)], there: u64) -> Vec<(u64, u64)> {
    let behind = all.iter().map(|(from, to)| (*from.max(&there), *to));
    let before = all.iter().map(|(from, to)| (*from, *to.min(&there)));
    behind
        .chain(before)
        .filter(|(from, to)| from < to)
        .collect()
}

/// Calls `each` with every stretch of pages that are all `wanted`, from address `there` on and around, until it has had
/// `bytes` of them. How many it had, and where it stopped.
fn runs(
    pid: u32,
    wanted: u64,
    bytes: u64,
    there: u64,
    each: &mut dyn FnMut(u64, u64) -> io::Result<()>,
) -> io::Result<(u64, u64)> {
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut left = bytes / PAGE * PAGE;
    let mut raw = vec![0u8; (STRETCH / PAGE * 8) as usize];
    let mut stopped = there;
    for (from, to) in from_there(&guest_memory(pid)?, there) {
        let mut at = from;
        while at < to && left > 0 {
            let pages = ((to - at).min(STRETCH) / PAGE) as usize;
            let raw = &mut raw[..pages * 8];
            pagemap.read_exact_at(raw, at / PAGE * 8)?;
            let entries: Vec<bool> = raw
                .chunks_exact(8)
                .map(|e| {
                    u64::from_ne_bytes(e.try_into().unwrap_or_default()) & (PRESENT | SWAPPED)
                        == wanted
                })
                .collect();
            let mut page = 0;
            while page < pages && left > 0 {
                let len = entries[page..].iter().take_while(|hit| **hit).count();
                if len > 0 {
                    let size = (len as u64 * PAGE).min(left);
                    each(at + page as u64 * PAGE, size)?;
                    left -= size;
                    stopped = at + page as u64 * PAGE + size;
                }
                page += len.max(1);
            }
            at += pages as u64 * PAGE;
        }
    }
    Ok((bytes / PAGE * PAGE - left, stopped))
}

/// Swaps out up to so many bytes, from address `there` on; how many were advised, and where it stopped. Who goes on from there does not
/// take the same pages again, which may be just those that are wanted.
pub fn out(pid: u32, bytes: u64, there: u64) -> io::Result<(u64, u64)> {
    // SAFETY: plain numbers; a new descriptor, or an error.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor the kernel has just made, owned by nobody else.
    let process = unsafe { OwnedFd::from_raw_fd(fd) };
    runs(pid, PRESENT, bytes, there, &mut |from, size| {
        let place = libc::iovec {
            iov_base: from as *mut libc::c_void,
            iov_len: size as usize,
        };
        // SAFETY: advice about another process's memory; ours is not touched, and the vector lives across the call.
        let done = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                process.as_raw_fd(),
                &raw const place,
                1usize,
                libc::MADV_PAGEOUT,
                0u32,
            )
        };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    })
}

/// Reads back up to so many bytes; how many were.
pub fn back(pid: u32, bytes: u64) -> io::Result<u64> {
    let read = runs(pid, SWAPPED, bytes, 0, &mut |from, size| {
        let pages: Vec<u64> = (0..size / PAGE).map(|n| from + n * PAGE).collect();
        for some in pages.chunks(BATCH) {
            let mut bytes = [0u8; BATCH];
            let here = libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: some.len(),
            };
            let there: Vec<libc::iovec> = some
                .iter()
                .map(|page| libc::iovec {
                    iov_base: *page as *mut libc::c_void,
                    iov_len: 1,
                })
                .collect();
            // SAFETY: `here` names a buffer of ours of that length; addresses of the other process are checked by
            // the kernel.
            let got = unsafe {
                libc::process_vm_readv(
                    pid as libc::pid_t,
                    &raw const here,
                    1,
                    there.as_ptr(),
                    there.len() as libc::c_ulong,
                    0,
                )
            };
            if got < 0 {
                let e = io::Error::last_os_error();
                // A mapping that went meanwhile is nobody's concern.
                if e.raw_os_error() != Some(libc::EFAULT) {
                    return Err(e);
                }
            }
        }
        Ok(())
    })?;
    Ok(read.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_memory_among_what_a_process_maps() {
        let maps = "\
55d0a0000000-55d0a8000000 r-xp 00000000 08:01 1 /usr/bin/qemu-system-x86_64
7f0000000000-7f0020000000 rw-p 00000000 00:00 0 
7f0030000000-7f0030001000 rw-p 00000000 00:00 0 
7f0040000000-7f0060000000 rw-s 00000000 00:01 5 /memfd:ram (deleted)
7f0070000000-7f0090000000 r--p 00000000 00:00 0 
7f00a0000000-7f00c0000000 rw-s 00000000 08:01 9 /srv/pool
nonsense
";
        assert_eq!(
            parse(maps),
            [
                (0x7f00_0000_0000, 0x7f00_2000_0000),
                (0x7f00_4000_0000, 0x7f00_6000_0000)
            ]
        );
    }

    #[test]
    fn from_anywhere_all_of_it_is_seen() {
        let all = [(10, 20), (30, 40)];
        assert_eq!(from_there(&all, 0), all);
        assert_eq!(from_there(&all, 35), [(35, 40), (10, 20), (30, 35)]);
        assert_eq!(from_there(&all, 25), [(30, 40), (10, 20)]);
        assert_eq!(from_there(&all, 99), all);
    }

    #[test]
    fn own_pages_are_found() {
        let size = 2 * LEAST as usize;
        let mut memory = vec![1u8; size];
        memory[size / 2] = 2;
        let mut found = 0;
        let pid = std::process::id();
        let all = runs(pid, PRESENT, LEAST, 0, &mut |_, size| {
            found += size;
            Ok(())
        });
        assert_eq!(all.unwrap().0, LEAST);
        assert_eq!(found, LEAST);
        assert_eq!(memory[size / 2], 2);
        assert!(back(u32::MAX >> 1, PAGE).is_err());
    }

    /// Swap that ends with this.
    struct Area(std::ffi::CString);

    impl Area {
        fn on(path: &std::path::Path) -> Option<Area> {
            std::fs::write(path, vec![0; 96 << 20]).ok()?;
            let made = std::process::Command::new("mkswap")
                .arg(path)
                .output()
                .ok()?;
            let name = std::ffi::CString::new(path.to_str()?).ok()?;
            // SAFETY: a string that ends with a zero and lives across the call.
            let on = unsafe { libc::swapon(name.as_ptr(), 0) } == 0;
            (made.status.success() && on).then_some(Area(name))
        }
    }

    impl Drop for Area {
        fn drop(&mut self) {
            // SAFETY: as above.
            unsafe { libc::swapoff(self.0.as_ptr()) };
        }
    }

    struct Program(std::process::Child);

    impl Drop for Program {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_programs_pages_go_out_and_come_back() {
        use std::io::BufRead;
        let dir = tempfile::tempdir().unwrap();
        let Some(_area) = Area::on(&dir.path().join("swap")) else {
            println!(
                "SKIPPED a_programs_pages_go_out_and_come_back: there is no swap to be had here"
            );
            return;
        };
        let fill =
            "import time; b = bytearray(b'x' * (64 << 20)); print(flush=True); time.sleep(600)";
        let program = std::process::Command::new("python3")
            .args(["-c", fill])
            .stdout(std::process::Stdio::piped())
            .spawn();
        let Ok(mut child) = program else {
            println!("SKIPPED a_programs_pages_go_out_and_come_back: no python3");
            return;
        };
        let said = child.stdout.take().unwrap();
        let program = Program(child);
        let mut line = String::new();
        std::io::BufReader::new(said).read_line(&mut line).unwrap();
        let pid = program.0.id();
        let swapped = || {
            let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            crate::kernel::field(&text, "VmSwap").unwrap() << 10
        };
        let (half, there) = out(pid, 24 << 20, 0).unwrap();
        let (rest, _) = out(pid, 24 << 20, there).unwrap();
        assert_eq!((half, rest), (24 << 20, 24 << 20));
        let gone = swapped();
        assert!(gone >= 32 << 20, "{gone}");
        assert!(back(pid, 64 << 20).unwrap() >= gone / 2);
        assert!(swapped() < gone / 4, "{}", swapped());
    }
}
