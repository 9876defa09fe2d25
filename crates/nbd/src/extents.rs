//! Block status: an export's ranges as the extents of one reply chunk.

use crate::handshake::CONTEXT_ID;
use crate::wire::{STATE_HOLE, STATE_ZERO, Style};
use hearth_volume::{Status, Volume};

/// Extents in one reply. The protocol allows 2^20; this many fit in 64 KiB, and a client
/// asks again from where the answer ends.
pub const EXTENTS_MAX: usize = 4095;

/// Bytes of the largest reply: context id, count, and the extents.
pub(crate) const REPLY_MAX: usize = 8 + EXTENTS_MAX * 16;

/// Makes the extents the client is told: merged, within the request, at least one.
pub(crate) fn collect(
    export: &dyn Volume,
    offset: u64,
    len: u64,
    one: bool,
    out: &mut Vec<(u64, Status)>,
) {
    out.clear();
    export.block_status(offset, len, out);
    let mut left = len;
    let mut kept = 0usize;
    for index in 0..out.len() {
        let Some(&(bytes, status)) = out.get(index) else {
            break;
        };
        let bytes = bytes.min(left);
        if bytes == 0 {
            if left == 0 {
                break;
            }
            continue;
        }
        left -= bytes;
        match kept.checked_sub(1).and_then(|last| out.get_mut(last)) {
            Some(last) if last.1 == status => last.0 += bytes,
            _ if kept == if one { 1 } else { EXTENTS_MAX } => break,
            _ => {
                if let Some(place) = out.get_mut(kept) {
                    *place = (bytes, status);
                    kept += 1;
                }
            }
        }
    }
    out.truncate(kept);
    if out.is_empty() {
        out.push((len, Status::Data));
    }
}

/// Bytes of a chunk's payload with `count` extents.
pub(crate) fn payload_len(style: Style, count: usize) -> usize {
    if style == Style::Extended {
        8 + count * 16
    } else {
        4 + count * 8
    }
}

/// Writes a chunk's payload; `out` has [`payload_len`] bytes.
pub(crate) fn encode(style: Style, extents: &[(u64, Status)], out: &mut [u8]) {
    let flags = |status: Status| match status {
        Status::Data => 0,
        Status::Hole => STATE_HOLE | STATE_ZERO,
        Status::Zero => STATE_ZERO,
    };
    let head = if style == Style::Extended { 8 } else { 4 };
    let Some((head, body)) = out.split_at_mut_checked(head) else {
        return;
    };
    if let Some((id, count)) = head.split_first_chunk_mut::<4>() {
        *id = CONTEXT_ID.to_be_bytes();
        if !count.is_empty() {
            count.copy_from_slice(&(extents.len() as u32).to_be_bytes());
        }
    }
    if style == Style::Extended {
        for (place, (bytes, status)) in body.chunks_exact_mut(16).zip(extents) {
            let value = u128::from(*bytes) << 64 | u128::from(flags(*status));
            place.copy_from_slice(&value.to_be_bytes());
        }
    } else {
        for (place, (bytes, status)) in body.chunks_exact_mut(8).zip(extents) {
            // A compact request is shorter than 4 GiB, and no extent is longer than its request.
            let value = bytes << 32 | u64::from(flags(*status));
            place.copy_from_slice(&value.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(Vec<(u64, Status)>);
    impl Volume for Fixed {
        fn disk(&self) -> u16 {
            1
        }
        fn size(&self) -> u64 {
            1 << 40
        }
        fn serial(&self) -> [u8; 16] {
            [0; 16]
        }
        fn capabilities(&self) -> hearth_volume::Capabilities {
            hearth_volume::Capabilities::all(true)
        }
        fn name(&self) -> &str {
            "d"
        }
        fn description(&self) -> String {
            String::new()
        }
        fn block_status(&self, _: u64, _: u64, out: &mut Vec<(u64, Status)>) {
            out.extend(&self.0);
        }
        fn closing(&self) -> bool {
            false
        }
        fn gone(&self) -> bool {
            false
        }
        fn admit(
            &self,
            _: &hearth_reactor::Caller,
            _: hearth_volume::Protocol,
        ) -> Result<hearth_volume::Visit, hearth_volume::Fault> {
            Err(hearth_volume::Fault::new("nobody is let in", ""))
        }
    }

    fn ask(extents: &[(u64, Status)], len: u64, one: bool) -> Vec<(u64, Status)> {
        let mut out = vec![(1, Status::Data)];
        collect(&Fixed(extents.to_vec()), 0, len, one, &mut out);
        out
    }

    #[test]
    fn neighbours_merge_and_the_end_is_cut() {
        use Status::*;
        let all = [
            (5, Data),
            (0, Hole),
            (5, Data),
            (4, Hole),
            (100, Zero),
            (1, Data),
        ];
        assert_eq!(ask(&all, 20, false), [(10, Data), (4, Hole), (6, Zero)]);
        assert_eq!(ask(&all, 20, true), [(10, Data)]);
        assert_eq!(ask(&all, 7, true), [(7, Data)]);
        assert_eq!(ask(&all, 1000, false).iter().map(|e| e.0).sum::<u64>(), 115);
        assert_eq!(ask(&[], 9, false), [(9, Data)]);
        assert_eq!(ask(&[(0, Hole)], 9, false), [(9, Data)]);
    }

    #[test]
    fn too_many_extents_are_cut() {
        let all: Vec<_> = (0..10_000)
            .map(|i| {
                (
                    1,
                    if i % 2 == 0 {
                        Status::Data
                    } else {
                        Status::Hole
                    },
                )
            })
            .collect();
        assert_eq!(ask(&all, 10_000, false).len(), EXTENTS_MAX);
    }

    #[test]
    fn layouts() {
        let extents = [(0x0102_0304, Status::Hole), (5, Status::Zero)];
        let mut compact = vec![0xAA; payload_len(Style::Structured, 2)];
        encode(Style::Structured, &extents, &mut compact);
        assert_eq!(
            compact,
            [0, 0, 0, 1, 1, 2, 3, 4, 0, 0, 0, 3, 0, 0, 0, 5, 0, 0, 0, 2]
        );
        let mut wide = vec![0xAA; payload_len(Style::Extended, 1)];
        encode(Style::Extended, &[(1 << 40, Status::Hole)], &mut wide);
        assert_eq!(
            wide,
            [
                0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3
            ]
        );
    }
}
