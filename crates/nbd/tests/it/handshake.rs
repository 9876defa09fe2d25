//! Handshakes, byte by byte.

use crate::common::*;
use hearth_nbd::{NbdSession, TlsMode};
use std::sync::atomic::Ordering;

const ACK: u32 = 1;
const UNSUP: u32 = 0x8000_0001;
const POLICY: u32 = 0x8000_0002;
const INVALID: u32 = 0x8000_0003;
const TLS_REQD: u32 = 0x8000_0005;
const UNKNOWN: u32 = 0x8000_0006;
const TOO_BIG: u32 = 0x8000_0009;

fn greeted() -> Wire {
    let mut wire = Wire::new();
    wire.greet(3);
    wire
}

fn session(tls: TlsMode, names: &[&str]) -> Wire {
    let disks: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(i, n)| Disk::new(i as u16 + 1, n, SIZE))
        .collect();
    let first = disks[0].clone();
    Wire::over(
        Box::new(NbdSession::new(server(disks), tls, "test".into())),
        first,
    )
}

#[test]
fn export_name_with_and_without_zeroes() {
    for (flags, zeroes) in [(0, 124), (1, 124), (3, 0), (2, 0)] {
        let mut wire = Wire::new();
        wire.greet(flags);
        wire.feed(&option_bytes(1, b"vm1"));
        assert_eq!(wire.u64(), SIZE);
        // FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, MULTI_CONN, CACHE, FAST_ZERO; no DF.
        assert_eq!(wire.u16(), 0b1101_0110_1101);
        assert_eq!(wire.take(zeroes), vec![0; zeroes]);
        assert!(wire.got.is_empty());
        wire.request(Style::Simple, Req::new(0, 5, 10));
        let want = wire.disk.data.lock().unwrap()[5..15].to_vec();
        assert_eq!(wire.reply(Style::Simple, 10).data, want);
    }
}

#[test]
fn an_unknown_name_ends_it_where_no_error_can_be_sent() {
    let mut wire = greeted();
    wire.feed(&option_bytes(1, b"nope"));
    assert!(wire.session.closing());
    assert!(wire.got.is_empty());
}

#[test]
fn unknown_client_flags_end_it() {
    let mut wire = Wire::new();
    wire.greet(4);
    assert!(wire.session.closing());
}

#[test]
fn options_need_fixed_newstyle() {
    let mut wire = Wire::new();
    wire.greet(0);
    wire.feed(&option_bytes(3, &[]));
    assert!(wire.session.closing());
}

#[test]
fn the_empty_name_is_the_only_disk() {
    let mut wire = greeted();
    let replies = wire.option(7, &go("", &[1, 2, 3, 99]));
    assert_eq!(replies.len(), 5);
    assert_eq!(replies[1].1, b"\0\x01vm1");
    assert_eq!(replies[2].1, b"\0\x02disk 3");
    assert_eq!(replies[3].1, [0, 3, 0, 0, 2, 0, 0, 0, 16, 0, 2, 0, 0, 0]);
    assert_eq!(wire.disk.clients.load(Ordering::Relaxed), 1);
    let disk = wire.disk.clone();
    drop(wire);
    assert_eq!(disk.clients.load(Ordering::Relaxed), 0);

    let mut wire = session(TlsMode::Off, &["a", "b"]);
    wire.greet(3);
    assert_eq!(wire.verdict(7, &go("", &[])), UNKNOWN);
    assert_eq!(wire.verdict(7, &go("b", &[])), ACK);
}

#[test]
fn list_info_and_unknown_options() {
    let mut wire = session(TlsMode::Off, &["a", "b"]);
    wire.greet(3);
    let list = wire.option(3, &[]);
    assert_eq!(list[0], (2, b"\0\0\0\x01adisk 1".to_vec()));
    assert_eq!(list[1], (2, b"\0\0\0\x01bdisk 2".to_vec()));
    assert_eq!(list[2].0, ACK);
    assert_eq!(wire.verdict(3, b"x"), INVALID);
    assert_eq!(wire.verdict(6, &go("a", &[])), ACK);
    assert_eq!(wire.verdict(6, &go("c", &[])), UNKNOWN);
    assert_eq!(wire.verdict(6, b""), INVALID);
    assert_eq!(
        wire.verdict(6, &[&go("a", &[])[..], b"tail"].concat()),
        INVALID
    );
    assert_eq!(wire.verdict(4, b""), UNSUP);
    assert_eq!(wire.verdict(0xffff_ffff, b"whatever"), UNSUP);
    assert_eq!(wire.verdict(5, b""), POLICY);
    assert_eq!(wire.verdict(2, b""), ACK);
    assert!(wire.session.closing());
}

/// An export that lets nobody in says why, where the protocol has a place for it; asking about it is
/// not entering.
#[test]
fn a_client_that_is_not_let_in_is_told_why() {
    let mut wire = Wire::new();
    wire.disk
        .full
        .store(true, std::sync::atomic::Ordering::Relaxed);
    wire.greet(3);
    let name = [&3u32.to_be_bytes()[..], b"vm1", &[0, 0]].concat();
    assert_eq!(wire.option(6, &name).last().map(|r| r.0), Some(1));
    let refused = wire.option(7, &name);
    let [(POLICY, why)] = &refused[..] else {
        panic!("{refused:?}")
    };
    assert_eq!(&why[..], b"no more clients here");
    assert!(wire.session.handshaking() && !wire.session.closing());
    wire.disk
        .full
        .store(false, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(wire.option(7, &name).last().map(|r| r.0), Some(1));
    assert!(!wire.session.handshaking());
}

#[test]
fn a_long_list_is_cut_with_an_error() {
    let long = "n".repeat(4000);
    let names: Vec<String> = (0..400).map(|i| format!("{long}{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let disks = names.iter().map(|n| Disk::new(1, n, 4096)).collect();
    let server = server(disks);
    let mut wire = Wire::over(
        Box::new(NbdSession::new(server, TlsMode::Off, "test".into())),
        Disk::new(1, "x", 4096),
    );
    wire.greet(3);
    let list = wire.option(3, &[]);
    assert_eq!(list.last().map(|l| l.0), Some(TOO_BIG));
    assert!(list.len() > 200 && list.len() < 300);
}

#[test]
fn long_options_are_refused_or_end_it() {
    let mut wire = greeted();
    assert_eq!(wire.verdict(3, &vec![0; 64 << 10]), INVALID);
    assert_eq!(wire.verdict(99, &vec![0; (64 << 10) + 1]), TOO_BIG);
    assert_eq!(wire.verdict(99, &vec![0; 1 << 20]), TOO_BIG);
    assert_eq!(wire.verdict(7, &go("vm1", &[])), ACK);

    let mut wire = greeted();
    let mut raw = option_bytes(99, &[]);
    raw[12..16].copy_from_slice(&u32::MAX.to_be_bytes());
    wire.feed(&raw);
    assert!(wire.session.closing());
}

#[test]
fn a_name_longer_than_a_string_may_be_is_malformed() {
    let mut wire = greeted();
    assert_eq!(wire.verdict(7, &go(&"n".repeat(4097), &[])), INVALID);
    assert_eq!(wire.verdict(7, &go(&"n".repeat(4096), &[])), UNKNOWN);
}

#[test]
fn a_wrong_option_magic_ends_it() {
    let mut wire = greeted();
    wire.feed(b"IHAVEOPX\0\0\0\x03\0\0\0\0");
    assert!(wire.session.closing());
}

#[test]
fn options_sent_ahead_wait_for_the_answers_to_be_read() {
    let mut wire = greeted();
    wire.deaf = true;
    let one = option_bytes(3, &[]);
    let all = one.repeat(20_000);
    let taken = wire.feed_in(&all, || usize::MAX);
    assert!(
        taken < 200_000,
        "{taken} bytes were taken while nothing was read"
    );
    wire.deaf = false;
    wire.settle();
    // A thousand options is the end of patience.
    let rest = wire.feed_in(&all[taken..], || usize::MAX);
    assert!(taken + rest < all.len());
    assert!(wire.session.closing());
}

#[test]
fn meta_contexts() {
    let mut wire = greeted();
    let query = |q: &[&str]| context_query("vm1", q);
    assert_eq!(
        wire.verdict(10, &query(&["base:allocation"])),
        INVALID,
        "before structured replies"
    );
    assert_eq!(
        wire.option(9, &query(&[])),
        [(4, b"\0\0\0\0base:allocation".to_vec()), (ACK, vec![])]
    );
    assert_eq!(wire.verdict(8, &[]), ACK);
    assert_eq!(wire.option(9, &query(&["base:"])).len(), 2);
    assert_eq!(
        wire.option(9, &query(&["qemu:dirty-bitmap:x", "base:other", "junk"]))
            .len(),
        1
    );
    assert_eq!(wire.option(10, &query(&[])).len(), 1);
    assert_eq!(wire.option(10, &query(&["base:"])).len(), 1);
    assert_eq!(
        wire.option(10, &query(&["x:y", "base:allocation", "base:allocation"]))
            .len(),
        2
    );
    assert_eq!(
        wire.verdict(10, &context_query("nope", &["base:allocation"])),
        UNKNOWN
    );
    let mut broken = query(&["base:allocation"]);
    broken.pop();
    assert_eq!(wire.verdict(10, &broken), INVALID);
    let mut many = query(&[]);
    let end = many.len();
    many[end - 4..].copy_from_slice(&u32::MAX.to_be_bytes());
    assert_eq!(wire.verdict(10, &many), INVALID);
    // The failed SET dropped what was set: block status is refused.
    assert_eq!(wire.verdict(7, &go("vm1", &[])), ACK);
    wire.request(Style::Structured, Req::new(7, 0, 4096));
    assert_eq!(wire.reply(Style::Structured, 0).error, 22);
}

#[test]
fn a_context_counts_for_its_export_only() {
    let mut wire = session(TlsMode::Off, &["a", "b"]);
    wire.greet(3);
    assert_eq!(wire.verdict(8, &[]), ACK);
    assert_eq!(
        wire.verdict(10, &context_query("a", &["base:allocation"])),
        ACK
    );
    assert_eq!(wire.verdict(7, &go("b", &[])), ACK);
    wire.request(Style::Structured, Req::new(7, 0, 4096));
    assert_eq!(wire.reply(Style::Structured, 0).error, 22);
}

#[test]
fn extended_headers_exclude_older_styles() {
    let mut wire = greeted();
    assert_eq!(wire.verdict(11, b"x"), INVALID);
    assert_eq!(wire.verdict(11, &[]), ACK);
    assert_eq!(wire.verdict(8, &[]), 0x8000_000a);
    wire.feed(&option_bytes(1, b"vm1"));
    assert!(wire.session.closing());
}

#[test]
fn read_only_exports_say_so() {
    let mut wire = greeted();
    wire.disk.read_only.store(true, Ordering::Relaxed);
    let replies = wire.option(7, &go("vm1", &[]));
    let flags = u16::from_be_bytes(replies[0].1[10..12].try_into().unwrap());
    assert_eq!(flags, 0b0101_0000_1111);
}

#[test]
fn where_tls_is_required_nothing_is_said_without() {
    let mut wire = session(TlsMode::Required, &["a"]);
    wire.greet(3);
    for option in [3, 6, 7, 8, 9, 10, 11, 77] {
        assert_eq!(wire.verdict(option, &[]), TLS_REQD);
    }
    assert_eq!(wire.verdict(5, b"x"), INVALID);
    assert_eq!(wire.verdict(2, &[]), ACK);
    assert!(wire.session.closing());

    let mut wire = session(TlsMode::Required, &["a"]);
    wire.greet(3);
    wire.feed(&option_bytes(1, b"a"));
    assert!(wire.session.closing());
    assert!(wire.got.is_empty());
}

#[test]
fn nothing_in_the_clear_is_read_after_starttls() {
    let mut wire = session(TlsMode::Allowed, &["a"]);
    wire.greet(3);
    wire.feed(&[option_bytes(5, &[]), option_bytes(7, &go("a", &[]))].concat());
    assert!(wire.session.closing());
}

#[test]
fn stopping_during_the_handshake_ends_it() {
    let mut wire = greeted();
    wire.session.shutdown();
    assert!(wire.session.closing());
    assert!(wire.with(|s, cx| s.recv_buf(cx)).is_none());
}
