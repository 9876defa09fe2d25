//! Where the second service keeps its things: beside the daemon's, never in them, because it may run as another
//! user, and because the daemon's run directory may go with the daemon.

use std::path::{Path, PathBuf};

use hearth_daemon::rundir;

/// The run directory that belongs to the daemon's: its name with `-monitor` behind it.
pub fn run_dir(daemons: &Path) -> PathBuf {
    beside(daemons)
}

/// The service's socket, for a daemon in this run directory.
pub fn socket(daemons: &Path) -> PathBuf {
    rundir::api_socket(&run_dir(daemons))
}

/// Where is kept what must outlive reboots, unless the user says otherwise.
pub fn default_state_dir() -> PathBuf {
    beside(&rundir::default_state_dir())
}

fn beside(dir: &Path) -> PathBuf {
    // Without what a trailing slash would make of it.
    let plain: PathBuf = dir.components().collect();
    let mut name = plain.into_os_string();
    name.push("-monitor");
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_lie_beside_the_daemons() {
        let socket = socket(Path::new("/run/hearth/"));
        assert_eq!(socket, Path::new("/run/hearth-monitor/api.sock"));
    }
}
