//! Devices that fail on demand, so that what happens then can be tested on the real data path.

use crate::op::{IoError, IoOp, OpKind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Which operations a rule hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Reads.
    Read,
    /// Writes, discards and write-zeroes.
    Write,
    /// Flushes.
    Flush,
    /// Everything: the device is gone.
    All,
}

/// A failure to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// Operations it hits.
    pub kind: FaultKind,
    /// First byte of the range it hits (flushes have none and are always hit).
    pub offset: u64,
    /// Bytes; `u64::MAX` for everything from `offset`.
    pub len: u64,
    /// The errno to answer, such as `EIO`.
    pub errno: i32,
}

impl FaultRule {
    /// Fails every operation of `kind` with `EIO`.
    pub fn eio(kind: FaultKind) -> FaultRule {
        FaultRule {
            kind,
            offset: 0,
            len: u64::MAX,
            errno: libc::EIO,
        }
    }

    fn hits(&self, kind: FaultKind, offset: u64, len: u64) -> bool {
        (self.kind == FaultKind::All || self.kind == kind)
            && (kind == FaultKind::Flush
                || (offset < self.offset.saturating_add(self.len)
                    && self.offset < offset.saturating_add(len)))
    }
}

/// The failures armed on one device. Costs one load per operation while there are none.
#[derive(Debug, Default)]
pub struct Faults {
    armed: AtomicBool,
    rules: Mutex<Vec<FaultRule>>,
}

impl Faults {
    /// Adds a rule; it applies to operations submitted from now on.
    pub fn arm(&self, rule: FaultRule) {
        self.rules
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .push(rule);
        self.armed.store(true, Ordering::Release);
    }

    /// Removes all rules.
    pub fn clear(&self) {
        self.armed.store(false, Ordering::Release);
        self.rules.lock().unwrap_or_else(|e| e.into_inner()).clear();
    }

    /// How `op` is to fail, if it is.
    #[inline]
    pub(crate) fn check(&self, op: &IoOp) -> Result<(), IoError> {
        self.check_range(
            match op.kind {
                OpKind::Read => FaultKind::Read,
                OpKind::Flush => FaultKind::Flush,
                _ => FaultKind::Write,
            },
            op.offset,
            op.len,
        )
    }

    #[inline]
    pub(crate) fn check_range(
        &self,
        kind: FaultKind,
        offset: u64,
        len: u64,
    ) -> Result<(), IoError> {
        if !self.armed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let rules = self.rules.lock().unwrap_or_else(|e| e.into_inner());
        rules
            .iter()
            .find(|r| r.hits(kind, offset, len))
            .map_or(Ok(()), |r| Err(IoError::Os(r.errno)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_hit_their_kind_and_range() {
        let faults = Faults::default();
        assert!(faults.check_range(FaultKind::Read, 0, 1).is_ok());
        faults.arm(FaultRule {
            kind: FaultKind::Read,
            offset: 4096,
            len: 4096,
            errno: libc::EIO,
        });
        assert!(faults.check_range(FaultKind::Read, 0, 4096).is_ok());
        assert_eq!(
            faults.check_range(FaultKind::Read, 0, 4097),
            Err(IoError::Os(libc::EIO))
        );
        assert!(faults.check_range(FaultKind::Write, 4096, 1).is_ok());
        faults.arm(FaultRule::eio(FaultKind::All));
        assert!(faults.check_range(FaultKind::Flush, 0, 0).is_err());
        faults.clear();
        assert!(faults.check_range(FaultKind::Flush, 0, 0).is_ok());
    }
}
