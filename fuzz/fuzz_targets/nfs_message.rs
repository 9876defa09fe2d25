//! Bytes of an NFS client: a stream cut into records, and what is in them.
#![no_main]

use hearth_nfs::handle::Sealer;
use hearth_nfs::mount::Ask;
use hearth_nfs::{nlm, nsm, portmap};
use hearth_nfs::record::{Assembler, MESSAGE_MAX, mark};
use hearth_nfs::rpc::{Call, Head, machine};
use hearth_nfs::v3::{Args, Procedure};
use hearth_nfs::xdr::{Reader, Writer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((steer, rest)) = data.split_first() else { return };
    let mut assembler = Assembler::new();
    // With bit 7 the bytes are a stream; else one message, for a procedure the other bits name.
    if steer & 0x80 != 0 {
        let mut rest = rest;
        while let Some((len, tail)) = rest.split_first() {
            let (piece, tail) = tail.split_at(tail.len().min(usize::from(*len) + 1));
            if assembler.feed(piece).is_err() {
                return;
            }
            // Memory for a long message may be a quarter longer, and an empty message of four bytes takes some.
            assert!(assembler.held() <= MESSAGE_MAX * 5 / 4 + data.len() * 16 + (128 << 10));
            rest = tail;
        }
    } else {
        assembler.feed(&mark(rest.len())).expect("not too long");
        assembler.feed(rest).expect("not too long");
    }
    while let Some(message) = assembler.next_message() {
        whole(&message, *steer);
    }
});

fn whole(message: &[u8], steer: u8) {
    machine(message);
    let mut r = Reader::new(message);
    if let Ok(Head::Call(call)) = Call::read(&mut r) {
        let mut again = Writer::new();
        call.write(&mut again);
        let back = Call::read(&mut Reader::new(again.as_slice()));
        assert_eq!(back, Ok(Head::Call(call.clone())));
        let _ = Ask::read(call.procedure, &mut r.clone());
        let _ = portmap::answer(&call, &mut r.clone(), &[]);
        let _ = nsm::answer(&call, &mut r.clone());
        locks(call.procedure, r.rest());
        arguments(Procedure::of(call.procedure), r.rest());
    }
    arguments(Procedure::of(u32::from(steer & 0x1f)), message);
    locks(u32::from(steer & 0x1f), message);
    let _ = portmap::dumped(0, message);
    assert_eq!(Sealer::new(1, &[1; 32]).open(message), None, "a forged handle");
}

/// Calls to the lock manager: what is understood means the same when it is written again, and ranges have an order.
fn locks(procedure: u32, bytes: &[u8]) {
    let Some(Ok((args, cookie))) = nlm::Args::read(procedure, &mut Reader::new(bytes)) else { return };
    if let nlm::Args::Lock { lock, .. } | nlm::Args::Unlock { lock } = &args
        && let Some((first, last)) = lock.range()
    {
        assert!(first <= last && last <= nlm::LAST);
    }
    let mut again = Writer::new();
    if let Some(procedure) = args.write(cookie, &mut again) {
        let back = nlm::Args::read(procedure, &mut Reader::new(again.as_slice()));
        assert_eq!(back, Some(Ok((args, cookie))));
    }
}

/// What is understood means the same when it is written again.
fn arguments(procedure: Option<Procedure>, bytes: &[u8]) {
    let Some(procedure) = procedure else { return };
    let Ok(args) = Args::read(procedure, &mut Reader::new(bytes)) else { return };
    assert_eq!(args.procedure(), procedure);
    let mut again = Writer::new();
    args.write(&mut again);
    assert_eq!(Args::read(procedure, &mut Reader::new(again.as_slice())), Ok(args));
}
