//! Children that neither a Ctrl-C nor their parent's sudden end leaves in the wrong state.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Lets a child outlive a Ctrl-C on the terminal (a group of its own), so that its parent decides
/// when it ends, and kills it if the parent ends without a word.
///
/// The kernel watches the *thread* that starts the child: start it from one that stays.
pub fn bound_to_us(command: &mut Command) -> &mut Command {
    command.process_group(0);
    // SAFETY: between fork and exec only prctl is called, which is async-signal-safe and takes
    // plain numbers.
    unsafe {
        command.pre_exec(|| {
            let kill = libc::SIGKILL as libc::c_ulong;
            match libc::prctl(libc::PR_SET_PDEATHSIG, kill, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn a_child_ends_with_the_thread_that_started_it() {
        let starter = std::thread::spawn(|| bound_to_us(Command::new("sleep").arg("600")).spawn());
        let mut child = starter.join().unwrap().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL));
    }
}
