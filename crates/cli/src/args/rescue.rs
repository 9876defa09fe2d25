//! The grammar of `hearth rescue`.

use std::path::PathBuf;

use clap::Args;

/// Reads a pool without writing anything to it, and writes what its disks' origins lack to where it is told.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Example:\n  hearth rescue /dev/nvme0n1p4\n  \
    hearth rescue /dev/nvme0n1p4 --disk vm1 --to /srv/vm1.rescued\n  \
    hearth rescue /dev/nvme0n1p4 --disk vm1 --onto /srv/vm1.raw\n  \
    hearth rescue /dev/nvme0n1p4 --disk vm2 --onto /disk1/vm2.raw --onto /disk2/vm2.raw\n  \
    hearth rescue /dev/nvme0n1p4 --disk vms/web.vmdk --onto /srv/vms/web.vmdk\n\n\
    Without --disk it lists the pool's disks. Every block is checked; one that cannot be trusted is not written, \
    but told, and the status is 1 then.")]
pub struct Rescue {
    /// The pool's flash: block devices or files that nobody serves, all of them
    #[arg(required = true, value_name = "FLASH")]
    pub flash: Vec<PathBuf>,
    /// The disk to save; of a file of a datastore its path there, which begins with the datastore's name
    #[arg(long, value_name = "NAME", requires = "where")]
    pub disk: Option<String>,
    /// Write what is dirty into a new file of the size of the disk, or of the datastore's file; the rest of it is holes
    #[arg(long, value_name = "FILE", group = "where", requires = "disk")]
    pub to: Option<PathBuf>,
    /// Write what is dirty over this file or device, which has the origin's content; of a mirror give each leg, of a datastore of two
    /// directories the file in each
    #[arg(long, value_name = "ORIGIN", group = "where", requires = "disk")]
    pub onto: Vec<PathBuf>,
    /// With --onto: although the origin may be newer than the flash, another leg of the mirror will differ, or it is a copy of the datastore's
    /// file
    #[arg(long, requires = "onto")]
    pub force: bool,
    /// The directory that `hearth serve` was given for what must outlive the flash
    /// [default: /var/lib/hearth for root, $XDG_STATE_HOME/hearth for others]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
}
