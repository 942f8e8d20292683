#!/usr/bin/env bash
# An operator takes sequences out of one daemon and into another: by a file, and while they decode.
#
#   tests/clients/sequences.sh BIN_DIR
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1
holds() { python3 -c "import json,sys; x=json.load(open('$dir/out')); sys.exit(not ($1))" || die "not $1: $(head -c 2000 "$dir/out")"; }

one=ipc://$dir/one.sock two=ipc://$dir/two.sock
export ATTND_ENDPOINT=$one
ctl=$bin/attnctl
log=$dir/two.log
start --listen "$two"
beside=$daemon log=$dir/one.log
start --listen "$one"
# the same pool in both
expect 0 "$bin/attnload" --endpoint "$two" --preset bytelm --sequences 2 --context 200
"$bin/attnload" --preset bytelm --sequences 2 --context 200 --duration 600 >"$dir/load.log" 2>&1 &
loader=$!
beside+=" $loader"
has_tokens() { "$ctl" --json sequences >"$dir/out" && grep -q '"tokens": [1-9][0-9][0-9]' "$dir/out"; }
await has_tokens
of() { python3 -c "import json; print(json.load(open('$dir/out'))$1)"; }
sequence=$(of "['sequences'][0]['sequence']") pool=$(of "['sequences'][0]['pool']")

expect 0 "$ctl" --json sequence export "$sequence" "$dir/a.seq"
holds "x['sequence'] == '$sequence' and x['pool'] == '$pool' and x['tokens'] >= 200 and x['blocks'] >= 13 and x['file'] == '$dir/a.seq'"
tokens=$(of "['tokens']")
[[ $(stat -c %a "$dir/a.seq") == 600 && $(stat -c %s "$dir/a.seq") == "$(of "['bytes']")" ]] || die "$(stat "$dir/a.seq")"
kill -0 "$loader" || die "the load does not go on: $(cat "$dir/load.log")"
expect 1 "$ctl" sequence import "$dir/a.seq"
says "already exists: .*$sequence"
expect 0 "$ctl" --endpoint "$two" --json sequence import "$dir/a.seq" --as 4711
holds "x['sequence'] == '4711' and x['tokens'] == $tokens and x['epoch'] > 0 and x['lease_seconds'] == 30"
expect 0 "$ctl" --endpoint "$two" --json sequences
holds "[s['tokens'] for s in x['sequences'] if s['sequence'] == '4711'] == [$tokens]"

# what is wrong is named, and changes nothing
head -c 5000 "$dir/a.seq" >"$dir/cut.seq"
expect 1 "$ctl" --endpoint "$two" sequence import "$dir/cut.seq" --as 1
says 'malformed message: .*/cut.seq: file has 5000 bytes, it must have [0-9]+'
cp "$dir/a.seq" "$dir/altered.seq"
printf '\1' | dd of="$dir/altered.seq" bs=1 seek=$(($(stat -c %s "$dir/a.seq") - 9000)) conv=notrunc status=none
expect 1 "$ctl" --endpoint "$two" sequence import "$dir/altered.seq" --as 1
says 'malformed message: .*/altered.seq: block [0-9]+: checksum is '
expect 0 "$ctl" --endpoint "$two" pool create other --layers 1 --q-heads 8 --kv-heads 2 --head-dim 64 --blocks 4
expect 1 "$ctl" --endpoint "$two" sequence import "$dir/a.seq" --as 1 --pool other
says 'invalid argument: .* is .* in the file, .* in the pool'
expect 1 "$ctl" --endpoint "$two" sequence import "$dir/a.seq" --as 1 --pool nowhere
says 'not found: .*nowhere'
expect 1 "$ctl" sequence export "$sequence" "$dir/no/where.seq"
says 'could not be read or written: make .*/no/where.seq: No such file'
mkfifo "$dir/pipe"
expect 1 "$ctl" sequence export "$sequence" "$dir/pipe"
says 'could not be read or written: .*/pipe is no regular file'
[[ -p $dir/pipe ]] || die "a pipe is replaced: $(ls -l "$dir")"
expect 1 "$ctl" sequence export 1 "$dir/none.seq"
says 'not found: sequence 1 is not open'
[[ ! -e $dir/none.seq ]] || die "a file of nothing"
expect 1 "$ctl" sequence move "$sequence" "ipc://$dir/nowhere"
says 'no connection to'
expect 0 "$ctl" --endpoint "$two" --json sequences
holds "[s['sequence'] for s in x['sequences'] if s['sequence'] != '4711'] == []"
for line in 'sequence export 1' 'sequence export one file' 'sequence move 1' 'sequence import' 'ping --pool x' \
  'sequence move 1 url --as 2' 'sequence import file --as two' 'sequence'; do
  expect 2 "$ctl" $line
done

# a sequence that decodes: its worker is told that it is gone
expect 0 "$ctl" --json sequence move "$sequence" "$two"
holds "x['sequence'] == '$sequence' and x['to'] == '$two' and x['tokens'] >= $tokens and 0 < x['blocks_in_stop'] <= x['blocks'] and x['stop_seconds'] > 0"
tokens=$(of "['tokens']")
expect 0 "$ctl" --endpoint "$two" --json sequences
holds "[s['tokens'] for s in x['sequences'] if s['sequence'] == '$sequence'] == [$tokens]"
expect 0 "$ctl" --json sequences
holds "'$sequence' not in [s['sequence'] for s in x['sequences']]"
# back, by people's eyes
expect 0 "$ctl" --endpoint "$two" sequence move "$sequence" "$one"
has "^sequence $sequence\$"
has '^stop_seconds [0-9.e-]+$'
wait "$loader" && die "the load goes on without its sequence"
beside=${beside% *}
expect 0 bash -c 'eval "$('"$ctl"' completion bash)"; PATH='"$bin"':$PATH COMP_LINE="attnctl sequence " COMP_POINT=17; _attnctl; echo "${COMPREPLY[*]}"'
has '^export import move place$'
stop
echo "sequences go where an operator wants them"
