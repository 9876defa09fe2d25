//! The origin of a disk that has none.
//!
//! A disk that lives on flash has everything else a disk has, so it has a device, too; nothing is on it. The
//! engine never asks it for anything. Should it be asked nevertheless, it reads as the disk does where nothing was
//! written, and takes no write: what it took would be gone.

use crate::helper::Job;
use crate::op::{IoError, OpKind};
use crate::remote::{Link, Remote};
use std::io;
use std::time::Duration;

/// Nothing, of some size.
#[derive(Debug)]
pub struct Nowhere {
    name: String,
    size: u64,
}

impl Nowhere {
    /// What is called `name`, and is `size` bytes of zeros.
    pub fn new(name: impl Into<String>, size: u64) -> Nowhere {
        Nowhere {
            name: name.into(),
            size,
        }
    }
}

impl Remote for Nowhere {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn refresh_size(&self) -> io::Result<u64> {
        Ok(self.size)
    }

    fn align(&self) -> u32 {
        512
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn push(&self, job: Job) {
        let Some(op) = job.op() else { return };
        let result = match op.kind {
            OpKind::Read => {
                for buf in &op.bufs {
                    buf.sub(0, buf.len()).bytes_mut().fill(0);
                }
                Ok(())
            }
            OpKind::Flush => Ok(()),
            _ => Err(IoError::Os(libc::EROFS)),
        };
        job.finish(result);
    }

    fn link(&self) -> Link {
        Link::up()
    }

    fn set_timeout(&self, _: Duration) {}

    fn hurry(&self) {}
}
