//! What protocols get of the daemon: data threads, and sockets in the run directory.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use hearth_fault::Fault;
use hearth_reactor::Reactors;
use hearth_volume::{Host, Socket};

use crate::rights::Rights;
use crate::rundir;
use crate::upgrade::sockets::Sockets;

/// A run directory that is ours already, and the threads of the daemon in it.
pub struct Site {
    run_dir: PathBuf,
    rights: Rights,
    reactors: Arc<Reactors>,
    sockets: Arc<Sockets>,
}

impl Site {
    /// Sockets in `run_dir` are for those who have `rights` to use disks.
    pub fn new(run_dir: &Path, rights: Rights, reactors: Arc<Reactors>) -> Arc<Site> {
        Site::with(run_dir, rights, reactors, Arc::default())
    }

    /// The same with sockets of the program before, perhaps, and for the next one.
    pub fn with(
        run_dir: &Path,
        rights: Rights,
        reactors: Arc<Reactors>,
        sockets: Arc<Sockets>,
    ) -> Arc<Site> {
        Arc::new(Site {
            run_dir: run_dir.to_owned(),
            rights,
            reactors,
            sockets,
        })
    }
}

impl Host for Site {
    fn reactors(&self) -> &Arc<Reactors> {
        &self.reactors
    }

    fn listen(&self, name: &Path) -> Result<Socket, Fault> {
        let parts: Vec<Component<'_>> = name.components().collect();
        let plain = parts.iter().all(|p| matches!(p, Component::Normal(_)));
        if !plain || !(1..=2).contains(&parts.len()) {
            return Err(Fault::new(
                format!(
                    "{} is no name of a socket in the run directory",
                    name.display()
                ),
                "please report this with the daemon's log",
            ));
        }
        if let [directory, _] = parts.as_slice() {
            rundir::make_below(&self.run_dir.join(directory), &self.rights)?;
        }
        let path = self.run_dir.join(name);
        Ok(self.sockets.unix(name, &path, self.rights.guests())?)
    }
}
